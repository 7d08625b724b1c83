"""Layers that move values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Flatten, Identity, Layer, Pad, Rescale, Reshape, Slice, Transpose
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each

CASES: dict[str, tuple[Callable[[], Layer], tuple[int, ...]]] = {
    "identity": (lambda: Identity(), (3, 2)),
    "flatten": (lambda: Flatten(), (3, 2, 2)),
    "flatten a vector": (lambda: Flatten(), (5,)),
    "reshape": (lambda: Reshape((2, 6)), (3, 4)),
    "reshape with a free axis": (lambda: Reshape([2, -1]), (3, 4)),  # type: ignore[arg-type]
    "transpose": (lambda: Transpose((2, 0, 1)), (3, 4, 2)),
    "rescale": (lambda: Rescale(-1.5), (3, 2)),
    "pad": (lambda: Pad(((1, 2), (0, 0), (0, 3))), (2, 3, 2)),
    "pad nothing": (lambda: Pad(((0, 0),)), (4,)),
    "slice": (lambda: Slice(slice(None, None, 2), slice(1, 3)), (5, 4, 2)),
    "slice from the end": (lambda: Slice(slice(-2, None)), (5, 2)),
    "slice nothing away": (lambda: Slice(), (3, 2)),
}


@each("case", CASES)
def test_layers_that_move_values_keep_the_contract(case: str, backend: Backend) -> None:
    make, shape = CASES[case]
    check_layer(make(), shape, backend=backend)


def predict(layer: Layer, x: np.ndarray) -> np.ndarray:
    return Model(layer, x.shape[1:], backend="numpy", dtype="float64").predict(x)


def test_they_compute_what_numpy_does() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 3))
    np.testing.assert_array_equal(predict(Flatten(), x), x.reshape(2, -1))
    np.testing.assert_array_equal(predict(Reshape((-1, 2)), x), x.reshape(2, 30, 2))
    np.testing.assert_array_equal(
        predict(Slice(slice(None, None, 2), slice(1, None)), x), x[:, ::2, 1:]
    )
    np.testing.assert_array_equal(predict(Transpose((2, 0, 1)), x), x.transpose(0, 3, 1, 2))
    padding = ((1, 0), (0, 2), (0, 0))
    np.testing.assert_array_equal(predict(Pad(padding), x), np.pad(x, ((0, 0), *padding)))


@each(
    ("make", "sentence"),
    [
        (lambda: Reshape((5, -1)), r"shape must have as many elements as \(3, 4\), got \(5, -1\)"),
        (
            lambda: Reshape((-1, -1)),
            r"shape must have as many elements as \(3, 4\), got \(-1, -1\)",
        ),
        (lambda: Reshape((0, -1)), "shape must be a tuple of positive ints"),
        (lambda: Reshape(12), "shape must be a tuple of positive ints, one may be -1, got 12"),
        (lambda: Pad(((1, 1),)), r"one pair for each of the 2 axes of the input \(3, 4\), got"),
        (lambda: Pad(((1, -1), (0, 0))), r"must be \(before, after\) pairs of non-negative ints"),
        (lambda: Pad(1), "padding must be .* pairs of non-negative ints, got 1"),
        (lambda: Slice(slice(3, None)), r"must select elements of the input \(3, 4\), got"),
        (lambda: Slice(*[slice(None)] * 3), r"expected at most one slice per axis of \(3, 4\)"),
        (lambda: Slice(slice(None, None, -1)), "slices with positive steps"),
        (lambda: Slice(2), "expected slices with positive steps"),
        (lambda: Transpose((1, 1)), r"axes must be a permutation such as \(1, 0\), got \(1, 1\)"),
        (lambda: Transpose((0,)), r"axes must be those of the input \(3, 4\), got \(0,\)"),
    ],
)
def test_options_that_do_not_fit_are_told(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Model(make(), (3, 4), backend="numpy")
