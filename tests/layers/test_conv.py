"""The convolution layer."""

import numpy as np

from pydtnn.layers import Conv2d, ConvTranspose2d
from pydtnn.model import Model
from tests.each import each


@each("stride", [1, 2, 3, 4])
@each("kernel", [1, 2, 3, 5])
def test_same_padding_gives_one_output_for_every_stride_pixels(stride, kernel):
    for size in range(1, 9):
        layer = Conv2d(1, kernel, stride=stride, padding="same")
        model = Model(layer, (size, size, 1), backend="numpy")
        assert model.output_shape == (-(-size // stride),) * 2 + (1,)


def test_conv_is_a_sum_over_the_taps_of_its_filters(backend):
    model = Model(Conv2d(2, 2, initializer="ones"), (3, 3, 2), backend=backend, dtype="float64")
    x = np.arange(18.0).reshape(1, 3, 3, 2)
    sums = [[x[0, i : i + 2, j : j + 2].sum() for j in range(2)] for i in range(2)]
    np.testing.assert_allclose(model.predict(x)[0, ..., 1], sums, rtol=1e-13)


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
def test_weights_know_how_many_inputs_and_outputs_each_element_has(layer, fan_in, fan_out):
    Model(layer, (9, 9, 4), backend="numpy")
    assert (layer.w.fan_in, layer.w.fan_out) == (fan_in, fan_out)
