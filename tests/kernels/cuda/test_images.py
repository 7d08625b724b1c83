"""Preparing images on the device, beside the same on the host: byte by byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np
import pytest

from pydtnn.data import Cutout, HorizontalFlip, Prepare, RandomCrop
from pydtnn.data.prepare import MOST_CHANGES, MOST_CHANNELS
from pydtnn.data.statistics import Statistics
from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda.feed import Feed
from pydtnn.kernels.cuda.graph import WARM_UP, Graphs
from pydtnn.kernels.cuda.images import CHANGES, CHANNELS, PrepareKernel
from pydtnn.utils.device import Device
from tests import gpu
from tests.each import each
from tests.simulated import SimulatedCupy, kernels

pytestmark = pytest.mark.skipif(kernels.COMPILER is None, reason="there is no g++")

DTYPES = ("float32", "float64", "float16", "bfloat16")

# nothing, one pixel, vectors that cross rows, images that vectors do not fit, several blocks
SHAPES = [
    *((4, 5, 6, 3), (0, 8, 8, 3), (1, 1, 1, 1), (9, 8, 6, 3), (5, 7, 5, 3), (3, 10, 9, 2)),
    *((70, 4, 4, 4), (2, 28, 28, 1), (3, 33, 40, 3), (2, 40, 31, 1), (2, 61, 60, 3)),
]

AUGMENT = {
    "nothing": (),
    "crop": (RandomCrop(3),),
    "padding beyond the image": (RandomCrop(50), HorizontalFlip()),
    "flip": (HorizontalFlip(),),
    "usual": (RandomCrop(2), HorizontalFlip(), Cutout(4)),
    "other order": (Cutout(3), HorizontalFlip(), RandomCrop(1), Cutout(1)),
    "one change twice": (RandomCrop(1), RandomCrop(2), HorizontalFlip(), HorizontalFlip()),
    "all cut out": (Cutout(1000),),
}


@pytest.fixture(scope="module", params=["simulated", pytest.param("gpu", marks=gpu.needed())])
def device(request: pytest.FixtureRequest) -> Any:
    """What of a backend is needed."""
    if request.param == "gpu":
        return create_backend("cuda")
    xp = SimulatedCupy()
    device: Any = SimpleNamespace(module=lambda name: kernels.Module(name, xp.put))
    return SimpleNamespace(images=PrepareKernel(device), empty=xp.empty, xp=xp)


def draw(rng: np.random.Generator, shape: Any, prepare: Prepare) -> tuple[Any, Any]:
    """Raw images, and their words."""
    x = rng.integers(0, 256, shape).astype(np.uint8)
    words = rng.integers(0, 2**32, (len(x), prepare.words), dtype=np.uint32)
    words[:1], words[1:2] = 0, 2**32 - 1  # the first place and the last
    return x, words


def prepared(device: Any, prepare: Prepare, x: Any, words: Any) -> np.ndarray:
    """What the device makes of images; it must leave them as they are."""
    on_device = device.xp.asarray(x)
    y = prepare(device, on_device, device.xp.asarray(words)).get()
    assert on_device.tobytes() == x.tobytes()
    return y


def statistics(rng: np.random.Generator, channels: int) -> Statistics:
    return Statistics(rng.random(channels), 0.1 + rng.random(channels))


@each("dtype", DTYPES)
@each("name", AUGMENT)
def test_images_have_the_bytes_of_the_host(device, rng, name, dtype):
    assert (MOST_CHANGES, MOST_CHANNELS) == (CHANGES, CHANNELS)
    for number, shape in enumerate(SHAPES):
        normalize = statistics(rng, shape[-1]) if number else None
        prepare = Prepare(AUGMENT[name], normalize, shape[1:], dtype)
        assert prepare.why_not == ""
        x, words = draw(rng, shape, prepare)
        y = prepared(device, prepare, x, words)
        expected = prepare.on_host(x, words)
        assert (y.dtype, y.shape) == (expected.dtype, x.shape) == (np.dtype(dtype), shape)
        assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("padding", [2**30, 2**31 - 1])
def test_changes_of_more_pixels_than_an_image_has_are_no_overflow(device, rng, padding):
    """Which the host cannot do: it would pad by so many."""
    x = rng.integers(1, 256, (64, 6, 5, 3)).astype(np.uint8)
    crops = (RandomCrop(padding), RandomCrop(padding), RandomCrop(padding))
    prepare = Prepare(crops, None, (6, 5, 3), "float32")
    words = rng.integers(0, 2**32, (64, prepare.words), dtype=np.uint32)
    words[:8], words[8:16], words[16:24] = 2**31, 0, 2**32 - 1  # not moved; to one side, the other
    words[24:40] = rng.integers(0, 2, (16, prepare.words)) * (2**32 - 1)
    y = prepared(device, prepare, x, words)
    np.testing.assert_array_equal(y[:8], x[:8])
    assert not y[8:].any()
    cutout = Prepare((Cutout(padding),), None, (6, 5, 3), "float32")
    assert not prepared(device, cutout, x, words[:, : cutout.words].copy()).any()


def test_the_product_is_rounded_before_the_sum(device, rng):
    """Or else the test above would hold for a fused multiply-add, too."""
    prepare = Prepare((), statistics(rng, 3), (8, 8, 3), "float32")
    x, words = draw(rng, (40, 8, 8, 3), prepare)
    scale, shift = (c.astype("float64") for c in prepare.normalize.coefficients("uint8"))
    fused = (x * scale + shift).astype("float32")  # in float64 all of it is nearly exact
    assert prepared(device, prepare, x, words).tobytes() != fused.tobytes()


def test_a_graph_prepares_whatever_images_and_words_are_fed_to_it(device, rng):
    prepare = Prepare(AUGMENT["usual"], statistics(rng, 3), (8, 8, 3), "float32")
    steps = [draw(rng, (5, 8, 8, 3), prepare) for _ in range(WARM_UP + 5)]
    feed, graphs = Feed(Device(device.xp), steps[0]), Graphs(Device(device.xp))
    made: list[Any] = []

    def work() -> Any:
        made.append(None)
        return prepare(device, *feed.arrays)

    for x, words in steps:
        feed.send(x, words)
        feed.take()
        y = graphs.run("prepare", work)
        assert y.get().tobytes() == prepare.on_host(x.copy(), words).tobytes()
    assert graphs.why_not == ""
    assert len(made) == WARM_UP + 1
