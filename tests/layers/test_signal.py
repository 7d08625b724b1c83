"""Layers of signals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    AvgPool1d,
    BatchNorm,
    Conv1d,
    Conv2d,
    Flatten,
    GlobalAvgPool1d,
    Layer,
    Linear,
    MaxPool1d,
    MaxPool2d,
    ReLU,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.testing import check_layer, check_plan
from tests.each import each

AWKWARD: dict[str, tuple[Callable[[], Layer], tuple[int, ...]]] = {
    "one tap": (lambda: Conv1d(3, 1), (5, 2)),
    "one position": (lambda: Conv1d(3, 3, padding=1), (1, 2)),
    "same, even kernel": (lambda: Conv1d(2, 4, padding="same"), (7, 3)),
    "stride and uneven padding": (lambda: Conv1d(5, 3, stride=2, padding=((2, 1),)), (11, 3)),
    "causal and dilated": (lambda: Conv1d(2, 3, dilation=3, padding=((6, 0),), bias=False), (7, 1)),
    "groups": (lambda: Conv1d(6, 3, groups=2, padding=1), (5, 4)),
    "depthwise": (lambda: Conv1d(6, 5, groups=3, stride=2), (13, 3)),
    "max": (lambda: MaxPool1d(2), (5, 3)),
    "max, overlapping": (lambda: MaxPool1d(3, stride=1, padding=1), (5, 2)),
    "average": (lambda: AvgPool1d(3, stride=2, padding=1), (7, 5)),
    "average, padding not counted": (
        lambda: AvgPool1d(4, stride=3, padding=((1, 2),), count_padding=False),
        (9, 3),
    ),
    "global": (lambda: GlobalAvgPool1d(), (7, 3)),
}


@each("case", AWKWARD)
def test_layers_of_signals_keep_the_contract(case: str, backend: Backend) -> None:
    make, shape = AWKWARD[case]
    check_layer(make(), shape, backend=backend, batch=2)


@each("dtype", ["float32", "bfloat16"])
def test_a_signal_is_convolved_and_pooled_like_a_row_of_an_image(
    dtype: str, backend: Backend
) -> None:
    x = np.random.default_rng(0).normal(size=(2, 17, 3)).astype("float32")
    signal = Sequential(Conv1d(5, 3, padding=1, name="conv"), MaxPool1d(2, name="pool"))
    row = Sequential(Conv2d(5, (1, 3), padding=(0, 1), name="conv"), MaxPool2d((1, 2), name="pool"))
    of_signal = Model(signal, (17, 3), backend=backend, dtype=dtype)
    of_row = Model(row, (1, 17, 3), backend=backend, dtype=dtype)
    w = of_signal.parameters["conv.w"].master
    of_row.parameters["conv.w"].master[...] = w[:, None]
    np.testing.assert_array_equal(of_signal.predict(x), of_row.predict(x[:, None])[:, 0])


def test_a_causal_convolution_does_not_depend_on_later_positions(backend: Backend) -> None:
    model = Model(Conv1d(4, 3, dilation=2, padding=((4, 0),)), (9, 2), backend=backend)
    x = np.random.default_rng(0).normal(size=(1, 9, 2)).astype("float32")
    before = model.predict(x)
    x[:, 5:] += 1
    np.testing.assert_array_equal(model.predict(x)[:, :5], before[:, :5])


def test_inputs_and_options_that_do_not_fit_are_told() -> None:
    for layer in (Conv1d(4, 3), MaxPool1d(2), AvgPool1d(2), GlobalAvgPool1d()):
        expected = rf"{type(layer).__name__}: expected an input of shape \(L, C\), got \(8, 8, 3\)"
        with pytest.raises(ValueError, match=expected):
            Model(layer, (8, 8, 3), backend="numpy")
    with pytest.raises(ValueError, match="Conv1d: kernel_size must be a positive int or 1 of them"):
        Conv1d(4, (3, 3))
    with pytest.raises(ValueError, match="Conv1d: padding must be smaller than kernel 3, got 3"):
        Model(Conv1d(4, 3, padding=3), (8, 3), backend="numpy")
    with pytest.raises(TypeError, match=r"use Conv1d\(filters, kernel_size\)"):
        Conv1d(3, 16, 3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="use stride="):
        Conv1d(16, 3, strides=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="use count_padding="):
        AvgPool1d(2, count_include_pad=True)  # type: ignore[call-arg]


def small() -> list[Layer]:
    body = [Conv1d(4, 3, padding=1), BatchNorm(), ReLU(), MaxPool1d(2), Conv1d(6, 2, groups=2)]
    return [*body, ReLU(), AvgPool1d(2, 1, padding=1), Flatten(), Linear(3)]


@each("plan", [None, "filter", "channel"])
def test_ranks_train_on_signals_as_one_does(plan: str | None) -> None:
    if plan is None:
        check_plan(small, (13, 2), meshes=[{"data": 3}])
    else:
        check_plan(small, (13, 2), plan=plan, meshes=[{plan: 2}])
