"""Affine maps equal Pillow's with the nearest pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.data.augment import operations
from tests.each import each

pytest.importorskip("PIL", reason="Pillow is not installed: the extra `data`")
from PIL import Image

FILL = (10, 20, 30)


def affine(image: Any, *coefficients: float) -> Any:
    return image.transform(
        image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST, fillcolor=FILL
    )


CASES: dict[str, tuple[Any, Any, tuple[float, ...]]] = {
    "shear_x": (operations.shear_x, lambda im, a: affine(im, 1, a, 0, 0, 1, 0), (0, 0.23, -0.3)),
    "shear_y": (operations.shear_y, lambda im, a: affine(im, 1, 0, 0, a, 1, 0), (0, 0.23, -0.3)),
    "translate_x": (
        lambda x, a, fill: operations.translate_x(x, a / x.shape[2], fill),
        lambda im, a: affine(im, 1, 0, a, 0, 1, 0),
        (0, 3, -40),
    ),
    "translate_y": (
        lambda x, a, fill: operations.translate_y(x, a / x.shape[1], fill),
        lambda im, a: affine(im, 1, 0, 0, 0, 1, a),
        (0, 3, -5),
    ),
    "rotate": (
        operations.rotate,
        lambda im, a: im.rotate(a, Image.Resampling.NEAREST, fillcolor=FILL),
        (0, 17.3, -30, 41.7),
    ),
}


@each("shape", [(1, 1), (9, 9), (7, 12), (32, 32)])
@each("name", CASES)
def test_a_map_is_pillow_s(rng, name, shape):
    ours, theirs, amounts = CASES[name]
    x = rng.integers(0, 256, (len(amounts), *shape, 3)).astype(np.uint8)
    before = x.copy()
    y = ours(x, np.array(amounts, float), np.array(FILL, np.uint8))
    np.testing.assert_array_equal(y[0], x[0])  # of no strength
    np.testing.assert_array_equal(x, before)
    expected = np.stack(
        [theirs(Image.fromarray(one), a) for one, a in zip(x, amounts, strict=True)]
    )
    # Pillow's coordinates have 16 bits after the point: another pixel where they are near its edge.
    assert (y == expected).all(axis=-1).mean() > 0.99
