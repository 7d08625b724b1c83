from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import Synthetic, load_synthetic
from tests.each import each

DIGESTS = {(32, 32, 3): 3213285666, (8, 8, 1): 3299326418, (9, 40, 2): 1222594365}


@each("shape", DIGESTS)
def test_images_depend_on_the_index_alone(shape):
    data = Synthetic(100, shape=shape)
    x, y = data.read(np.arange(100))
    assert x.shape == (100, *shape)
    assert x.dtype == np.uint8
    assert zlib.crc32(x.tobytes()) == DIGESTS[shape]  # on every machine
    for indices in ([17], [99, 3, 50], []):
        some, labels = Synthetic(100, shape=shape).read(np.array(indices, np.int64))
        np.testing.assert_array_equal(some, x[indices])
        np.testing.assert_array_equal(labels, y[indices])


def test_images_have_the_shape_of_cifar_unless_another_one_is_given():
    assert Synthetic(20).read(np.arange(20))[0].shape == (20, 32, 32, 3)


def test_seed_and_split_make_other_images_of_the_same_classes():
    def images(**options: Any) -> NDArray[np.uint8]:
        return Synthetic(20, **options).read(np.arange(20))[0]

    one = images()
    np.testing.assert_array_equal(images(seed=0, split="train"), one)
    for other in (images(seed=1), images(split="test")):
        assert (other != one).mean() > 0.9


@each("classes", [2, 3, 4, 5, 10, 100, 1000])
def test_every_class_has_equally_many_images_and_its_own_bands(classes):
    data = Synthetic(2 * classes, classes=classes)
    _, y = data.read(np.arange(2 * classes))
    np.testing.assert_array_equal(np.bincount(y), np.full(classes, 2))
    bands = data._bands.reshape(classes, 4)
    assert len(np.unique(bands, axis=0)) == classes
    assert 0 < bands.min() < bands.max() < 2**15  # half a cycle per pixel


def test_no_pixel_overflows():
    x, _ = Synthetic(3000, shape=(16, 16, 3)).read(np.arange(3000))
    # The texture and the noise are small steps: a wrapped pixel would differ from its neighbour
    # by more than twice the greatest contrast and the noise.
    steps = np.abs(np.diff(x.astype(int), axis=2))
    assert steps.max() <= 2 * (80 + 19)
    assert x.min() >= 0
    assert x.max() <= 255


def test_the_statistics_are_near_those_of_all_images():
    train, test = load_synthetic(samples=4000)
    x = train.read(np.arange(4000))[0] / 255
    assert train.mean is not None
    assert train.std is not None
    # Backgrounds deviate by 0.063, so 1,000 of them by 0.002 on average.
    np.testing.assert_allclose(train.mean, x.mean((0, 1, 2)), atol=0.006)
    np.testing.assert_allclose(train.std, x.std((0, 1, 2)), atol=0.006)
    assert test.mean is train.mean


def accuracy_of_a_linear_model(
    x: NDArray[Any], y: NDArray[Any], x_test: NDArray[Any], y_test: NDArray[Any]
) -> tuple[float, float]:
    """Fit classes by ridge regression; return the accuracy on the test set and in training."""
    curvature, slope = x.T @ x / len(x), x.T @ np.eye(y.max() + 1, dtype=x.dtype)[y] / len(x)
    w = np.linalg.solve(curvature + np.eye(len(slope), dtype=x.dtype), slope)
    on_test, on_train = (np.argmax(a @ w, axis=1) == b for a, b in ((x_test, y_test), (x, y)))
    return on_test.mean(), on_train.mean()


def with_bias(x: NDArray[Any]) -> NDArray[np.float32]:
    x = x.reshape(len(x), -1)
    return np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float32)


def pixels(x: NDArray[np.uint8]) -> NDArray[np.float32]:
    return with_bias((x / 255 - 0.5) / 0.1)


def energies(x: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What a convolutional net can compute: how much of each wave there is in the image."""
    power = np.abs(np.fft.rfft2(x - x.mean((1, 2), keepdims=True), axes=(1, 2))) ** 2
    power = power.sum(-1)  # (n, H, W // 2 + 1)
    power = power + power[:, (-np.arange(power.shape[1])) % power.shape[1]]  # mirrored
    log = np.log(power[:, : power.shape[1] // 2 + 1].reshape(len(x), -1) + 1)
    return with_bias((log - log.mean(0)) / (log.std(0) + 1e-3))


@each("shape", [(16, 16, 3), (28, 28, 1)])
def test_the_energy_of_waves_tells_the_classes_apart_and_pixels_do_not(shape):
    train, test = load_synthetic(shape=shape)
    (x, y), (x_test, y_test) = train.read(np.arange(3000)), test.read(np.arange(1000))
    best, on_train = accuracy_of_a_linear_model(pixels(x), y, pixels(x_test), y_test)
    assert best < 0.4 < on_train  # it has been trained
    best, _ = accuracy_of_a_linear_model(energies(x), y, energies(x_test), y_test)
    assert best > 0.97


@each(
    ("options", "reason"),
    [
        (
            {"shape": (32, 32)},
            r"must be .height, width, channels., such as .32,32,3., got \(32, 32\)",
        ),
        ({"shape": (7, 32, 3)}, "height must be at least 8, got 7"),
        ({"shape": (32, 32, 0)}, "channels must be at least 1, got 0"),
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"shape": 32}, "must be .height, width, channels., such as .32,32,3., got 32"),
        ({"classes": "10"}, "classes must be a whole number, got '10'"),
    ],
)
def test_data_that_cannot_be_made_are_refused(options, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        load_synthetic(**options)
