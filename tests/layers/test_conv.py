"""The convolution layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Conv2d, ConvTranspose2d, Sequential
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each

AWKWARD: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "1x1": ({"filters": 3, "kernel_size": 1}, (4, 3, 2)),
    "1x1 strided": ({"filters": 3, "kernel_size": 1, "stride": 2}, (5, 4, 2)),
    "same": ({"filters": 2, "kernel_size": 3, "padding": "same"}, (4, 5, 3)),
    "same, even kernel, strided": (
        {"filters": 2, "kernel_size": (4, 2), "padding": "same", "stride": (2, 3)},
        (5, 7, 2),
    ),
    "asymmetric padding": (
        {"filters": 2, "kernel_size": 3, "padding": ((2, 0), (1, 2))},
        (4, 4, 2),
    ),
    "one row": ({"filters": 2, "kernel_size": (1, 3), "padding": (0, 1)}, (1, 5, 1)),
    "rows that no window reaches": ({"filters": 2, "kernel_size": 2, "stride": 3}, (6, 7, 2)),
    "dilation": ({"filters": 2, "kernel_size": 3, "dilation": (2, 1), "padding": 2}, (5, 4, 2)),
    "groups": ({"filters": 4, "kernel_size": 3, "groups": 2, "padding": 1}, (4, 4, 6)),
    "depthwise": ({"filters": 3, "kernel_size": 3, "groups": 3, "bias": False}, (5, 4, 3)),
    "depthwise, two filters a channel": (
        {"filters": 6, "kernel_size": 2, "groups": 3, "stride": 2},
        (4, 4, 3),
    ),
    "no bias": ({"filters": 2, "kernel_size": 2, "bias": False}, (3, 3, 2)),
    "kernel as large as the image": ({"filters": 2, "kernel_size": (3, 4)}, (3, 4, 2)),
}


@each("case", AWKWARD)
def test_conv_keeps_the_contract(case: str, backend: Backend) -> None:
    options, shape = AWKWARD[case]
    check_layer(Conv2d(**options), shape, backend=backend, batch=2)


@each("stride", [1, 2, 3, 4])
@each("kernel", [1, 2, 3, 5])
def test_same_padding_gives_one_output_for_every_stride_pixels(stride: int, kernel: int) -> None:
    for size in range(1, 9):
        layer = Conv2d(1, kernel, stride=stride, padding="same")
        model = Model(layer, (size, size, 1), backend="numpy")
        assert model.output_shape == (-(-size // stride),) * 2 + (1,)


def test_same_padding_puts_the_odd_zero_after() -> None:
    layer = Conv2d(1, 4, padding="same")
    Model(layer, (8, 8, 1), backend="numpy")
    assert layer.geometry.padding == ((1, 2), (1, 2))


def test_convolutions_of_equal_shape_have_one_geometry() -> None:
    """So that caches find it without comparing fields, in every kernel call."""
    same = [Conv2d(4, 3, padding=1) for _ in range(2)]
    Model(Sequential(*same, other := Conv2d(4, 3)), (5, 5, 4), backend="numpy")
    assert same[0].geometry is same[1].geometry
    assert other.geometry != same[0].geometry


def test_conv_is_a_sum_over_the_taps_of_its_filters(backend: Backend) -> None:
    model = Model(Conv2d(2, 2, initializer="ones"), (3, 3, 2), backend=backend, dtype="float64")
    x = np.arange(18.0).reshape(1, 3, 3, 2)
    sums = [[x[0, i : i + 2, j : j + 2].sum() for j in range(2)] for i in range(2)]
    np.testing.assert_allclose(model.predict(x)[0, ..., 1], sums, rtol=1e-13)


@each(
    ("options", "sentence"),
    [
        (
            {"padding": 4},
            "Conv2d: padding must be smaller than kernel 3, got 4; use padding=1 to keep",
        ),
        ({"padding": -1}, "Conv2d: padding must be an int, 2 ints, .* got -1"),
        ({"padding": "sane"}, 'Conv2d: padding must be .* "same" or "valid", got \'sane\''),
        ({"padding": (1, 2, 3)}, "Conv2d: padding must be an int"),
        ({"padding": 1.0}, r"Conv2d: padding must be an int.* got 1\.0"),
        (
            {"kernel_size": 9},
            r"kernel 9 must have .* at most the padded input 8, got 9; use a smal",
        ),
        ({"dilation": 4}, r"kernel 3 must have an extent of at most the padded input 8, got 9"),
        ({"groups": 2}, "must be divisible by groups=2, got 3 channels and 4 filters"),
        ({"groups": 3}, "must be divisible by groups=3, got 3 channels and 4 filters"),
    ],
)
def test_options_that_do_not_fit_the_input_are_told(options: dict[str, Any], sentence: str) -> None:
    layer = Conv2d(**{"filters": 4, "kernel_size": 3, **options})
    with pytest.raises(ValueError, match=sentence):
        Model(layer, (8, 8, 3), backend="numpy")


@each(
    ("options", "sentence"),
    [
        ({"filters": 0}, "Conv2d: filters must be at least 1, got 0"),
        ({"groups": 0}, "Conv2d: groups must be at least 1, got 0"),
        ({"kernel_size": 0}, "Conv2d: kernel_size must be a positive int or 2 of them, got 0"),
        ({"kernel_size": (3, 3, 3)}, "Conv2d: kernel_size must be a positive int or 2 of them"),
        ({"stride": 1.5}, r"Conv2d: stride must be a positive int or 2 of them, got 1\.5"),
        ({"dilation": (1, -1)}, r"Conv2d: dilation must be .* got \(1, -1\)"),
    ],
)
def test_options_that_never_fit_are_told_at_once(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Conv2d(**{"filters": 4, "kernel_size": 3, **options})


@each(
    ("layer", "fan_in", "fan_out"),
    [
        (Conv2d(6, (3, 5)), 15 * 4, 15 * 6),
        (Conv2d(6, (3, 5), groups=2), 15 * 2, 15 * 3),
        (ConvTranspose2d(6, (3, 5)), 15 * 4, 15 * 6),
        (ConvTranspose2d(6, (3, 5), groups=2), 15 * 2, 15 * 3),
        (ConvTranspose2d(6, (4, 6), stride=2, groups=2), 6 * 2, 24 * 3),
    ],
)
def test_weights_know_how_many_inputs_and_outputs_each_element_has(
    layer: Any, fan_in: int, fan_out: int
) -> None:
    Model(layer, (9, 9, 4), backend="numpy")
    assert (layer.w.fan_in, layer.w.fan_out) == (fan_in, fan_out)


def test_an_input_that_is_no_image_is_told() -> None:
    with pytest.raises(ValueError, match=r"conv2d: Conv2d: expected an input of shape \(H, W, C\)"):
        Model(Conv2d(4, 3), (784,), backend="numpy")
