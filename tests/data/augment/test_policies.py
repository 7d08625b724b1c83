"""RandAugment: which operations are applied, how often and how strongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.data import RandAugment
from pydtnn.data.augment.operations import NO_OPERATION, OPERATIONS, apply_chosen
from pydtnn.data.augment.randaugment import CHOICES
from pydtnn.data.order import below
from tests.each import each

FILL = np.array([100, 120, 140], np.uint8)
NAMES = [*OPERATIONS]


def drawn(rng: np.random.Generator, n: int, count: int) -> tuple[Any, Any]:
    x = rng.integers(0, 256, (n, 12, 10, 3)).astype(np.uint8)
    return x, rng.integers(0, 2**32, (n, count), dtype=np.uint32)


def applied(x: Any, name: str, share: float, negative: bool) -> Any:
    """Apply one operation to one image."""
    operation = OPERATIONS[name]
    amount = operation.most * share * (-1 if negative and operation.signed else 1)
    return operation.apply(x[None], np.array([amount]), FILL)[0]


def test_randaugment_applies_uniformly_chosen_operations_of_one_strength(rng):
    x, words = drawn(rng, 100, 8)
    y = RandAugment(3, 12)(x.copy(), words, FILL)
    for i in range(100):
        expected = x[i]
        for step in range(3):
            which = CHOICES[below(words[i, 2 * step], 14)]
            if which != NO_OPERATION:
                negative = bool(words[i, 2 * step + 1] >> 31)
                expected = applied(expected, NAMES[which], 12 / 30, negative)
        np.testing.assert_array_equal(y[i], expected)
    assert {NAMES[i] for i in CHOICES if i != NO_OPERATION} == {*NAMES}
    counts = np.bincount(below(rng.integers(0, 2**32, 14_000, dtype=np.uint32), 14))
    assert 850 < counts.min() <= counts.max() < 1150  # 1000, deviation 30


@each("name", [n for n in NAMES if n not in ("autocontrast", "equalize")])
def test_an_operation_of_no_strength_is_the_identity(rng, name):
    x, _ = drawn(rng, 4, 0)
    number = np.full(4, NAMES.index(name))
    y = apply_chosen(x.copy(), number, np.zeros(4), np.arange(4) % 2 == 0, FILL)
    np.testing.assert_array_equal(y, x)
    strong = apply_chosen(x.copy(), number, np.ones(4), np.arange(4) % 2 == 0, FILL)
    assert (strong != x).any(axis=(1, 2, 3)).all()


def test_amounts_are_proportional_to_the_magnitude():
    """Torchvision's of RandAugment(magnitude=9) on 32 x 32 pixels; of solarize, the paper's."""
    amounts = {"shear_x": 0.09, "rotate": 9.0, "brightness": 0.27, "posterize": 1.2}
    amounts |= {"solarize": 76.8, "translate_x": 9 / 30 * 150 / 331}
    for name, amount in amounts.items():
        assert OPERATIONS[name].most * 9 / 30 == pytest.approx(amount, rel=1e-12)


def test_translations_are_whole_pixels(rng):
    x = rng.integers(0, 256, (1, 32, 32, 3)).astype(np.uint8)
    number = np.array([NAMES.index("translate_x")])
    y = apply_chosen(x.copy(), number, np.array([9 / 30]), np.array([True]), FILL)
    np.testing.assert_array_equal(y[0, :, 4:], x[0, :, :-4])  # 4.35 pixels
    assert (y[0, :, :4] == FILL).all()
