from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np
from numpy.typing import NDArray

from pydtnn.data import ArrayDataset, Batch, Cutout, HorizontalFlip, Loader, Prepare, RandomCrop
from pydtnn.data.statistics import Statistics
from pydtnn.kernels import Backend, create_backend
from tests.each import each

AUGMENT = (RandomCrop(2), HorizontalFlip(), Cutout(2))
STATISTICS = Statistics(np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.3, 0.25]))
SHAPE = (6, 5, 3)


def batches(data: ArrayDataset, **options: Any) -> list[Batch]:
    with Loader(data, global_batch_size=8, seed=3, **options) as loader:
        return list(loader.epoch(2))


class Laid(ArrayDataset):
    """Pixels as arrays of another layout, or of floats."""

    floats = False

    def read(self, indices: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        x, y = super().read(indices)
        return x / 255 if self.floats else np.asfortranarray(x), y


@dataclass(frozen=True)
class Unpadded(RandomCrop):
    """One that is derived from ours and does something else."""

    def __call__(self, x: Any, words: Any, fill: Any) -> Any:
        assert words.shape == (len(x), 4)
        return 255 - x


@each("name", ["numpy", "cpu"])
@each("dtype", ["float32", "float64", "float16", "bfloat16"])
@each("augment", [(), AUGMENT, AUGMENT[1:]])
def test_raw_batches_become_those_that_the_loader_prepares(images, augment, dtype, name):
    backend = create_backend(name)
    ready = batches(images, augment=augment, dtype=dtype)
    raw = batches(Laid(images.x, images.y), augment=augment, dtype=dtype, raw=True)
    for one, other in zip(ready, raw, strict=True):
        assert one.prepare is None
        assert one.words is None
        assert other.words is not None
        assert other.words.shape == (len(other), 4 * len(augment))
        assert other.x.dtype == np.uint8
        assert other.x.flags.c_contiguous
        np.testing.assert_array_equal(other.x, images.x[other.samples])
        for rows in (slice(None), slice(2, 5), slice(3, 3)):
            expected = one.inputs(backend, rows)
            x = other.inputs(backend, rows)
            assert x.dtype == expected.dtype == np.dtype(dtype)
            assert x.tobytes() == expected.tobytes() == one.x[rows].tobytes()
        np.testing.assert_array_equal(other.x, images.x[other.samples])  # as it was


def test_float_targets_are_what_a_model_s_outputs_are(images):
    data = ArrayDataset(images.x, np.linspace(0, 1, len(images)))
    outputs = {"float64": "float64", "float32": "float32", "float16": "float32"}
    for dtype, output in {**outputs, "bfloat16": "float32"}.items():
        batch = batches(data, dtype=dtype, raw=True)[0]
        assert batch.y.dtype == np.dtype(output)
        np.testing.assert_array_equal(batch.y, data.y[batch.samples].astype(output))


@each(
    ("augment", "reason"),
    [
        ((RandomCrop(1), Unpadded(1)), "Unpadded has no kernel of its own"),
        ((HorizontalFlip(),) * 5, "there are 5 augmentations, and the device takes 4"),
    ],
)
def test_what_the_device_cannot_do_is_done_here_and_the_loader_says_why(images, augment, reason):
    loader = Loader(images, global_batch_size=8, augment=augment, raw=True)
    assert loader.why_not_raw == reason
    assert Loader(images, global_batch_size=8, augment=augment).why_not_raw == ""
    assert Loader(images, global_batch_size=8, augment=AUGMENT, raw=True).why_not_raw == ""
    asked = batches(images, augment=augment, raw=True)
    for one, other in zip(batches(images, augment=augment), asked, strict=True):
        assert other.prepare is None
        assert other.x.tobytes() == one.x.tobytes()


@each(
    ("x", "reason"),
    [
        (np.zeros((8, 4, 4, 3), np.float32), "array has no uint8 pixels"),
        (np.zeros((8, 12), np.uint8), "samples of shape (12,) are no images"),
        (np.zeros((8, 4, 4, 5), np.uint8), "images have 5 channels, and the device takes 4"),
    ],
)
def test_samples_that_are_no_pictures_come_ready(x, reason):
    data = ArrayDataset(x, np.zeros(8, int))
    assert reason in Loader(data, global_batch_size=8, raw=True).why_not_raw
    (batch,) = batches(data, raw=True)
    assert batch.prepare is None
    assert batch.x.dtype == np.float32
    pixels = np.zeros((8, 4, 4, 3), np.uint8)
    floats = Laid(pixels, np.zeros(8, int), like=ArrayDataset(pixels, np.zeros(8, int)))
    floats.floats = True
    assert batches(floats, raw=True)[0].prepare is None


def test_what_does_the_same_is_the_same_key():
    copied = Statistics(STATISTICS.mean.copy(), STATISTICS.std.copy())
    one = Prepare(AUGMENT, STATISTICS, SHAPE, "float32")
    assert {one, Prepare(AUGMENT, copied, SHAPE, "float32")} == {one}
    others = [(AUGMENT[:2], copied, "float32"), ((RandomCrop(3), *AUGMENT[1:]), copied, "float32")]
    others += [(AUGMENT, statistics, "float32") for statistics in (None, *scaled(copied))]
    others += [(AUGMENT, copied, "float64"), (AUGMENT, copied, "float16")]
    every = {one, *(Prepare(change, known, SHAPE, dtype) for change, known, dtype in others)}
    assert len(every) == 8
    assert one != "another"


def scaled(known: Statistics) -> list[Statistics]:
    return [replace(known, std=known.std * 2), replace(known, mean=known.mean * 2)]


def test_a_device_s_kernel_is_told_all_by_value(images):
    """No array of the host but the coefficients goes there: it is captured in a graph."""
    told: dict[str, Any] = {}

    class Images:
        def prepare(self, *arguments: Any, out: Any) -> None:
            told.update(arguments=arguments, out=out)

    backend: Backend = replace(create_backend("numpy"), images=Images())
    (batch, *_) = batches(images, augment=AUGMENT, raw=True)
    y = batch.inputs(backend)
    x, words, changes, fill, scale, shift = told["arguments"]
    assert np.shares_memory(x, batch.x)
    assert np.shares_memory(words, batch.words)
    assert y is told["out"]
    assert (y.shape, y.dtype) == (batch.x.shape, np.float32)
    assert changes == [("crop", 2), ("flip", 0), ("cutout", 2)]
    assert fill.dtype == np.uint8
    assert scale.dtype == shift.dtype == np.float32
    assert len(fill) == len(scale) == len(shift) == 3
