"""What is fed to a step; the simulated device runs nothing before somebody waits for it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda.feed import APART, SETS, Feed, LateValues
from pydtnn.utils.device import Device
from tests import gpu
from tests.each import each
from tests.simulated import SimulatedCupy

SEEDS = range(4)


@pytest.fixture(params=[*SEEDS, pytest.param("gpu", marks=gpu.needed())])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "gpu":
        return Device(create_backend("cuda").xp)
    return Device(SimulatedCupy(seed=request.param))


def like(n: int = 5) -> list[np.ndarray]:
    """What a step is fed: of several types, not all a multiple of anything, one empty."""
    return [
        np.zeros((n, 3, 3, 1), np.uint8),
        np.zeros(n, np.int64),
        np.zeros((n, 0), np.uint32),
        np.zeros((n, 2), ml_dtypes.bfloat16),
        np.zeros(3, np.float64),
    ]


def filled(number: int) -> list[np.ndarray]:
    """Arrays like that, whose elements tell the step and the array."""
    return [np.full_like(a, (7 * number + i) % 100) for i, a in enumerate(like())]


def test_arrays_of_several_types_arrive_at_places_that_stay(device):
    feed = Feed(device, like())
    assert [(a.shape, a.dtype) for a in feed.arrays] == [(a.shape, a.dtype) for a in like()]
    places = [a.data.ptr for a in feed.arrays]
    assert all(place % 512 == 0 for place in places)  # as arrays of CuPy's pool
    for step in range(3):
        feed.send(*filled(step))
        feed.take()
        assert [a.data.ptr for a in feed.arrays] == places
        for array, expected in zip(feed.arrays, filled(step), strict=True):
            assert array.get().tobytes() == expected.tobytes()


@each("ahead", [False, True])
def test_every_step_reads_what_was_sent_for_it_however_far_the_host_is_ahead(device, ahead):
    feed, seen = Feed(device, like()), []
    for step in range(4 * SETS):
        if step == 0 or not ahead:
            host = filled(step)
            feed.send(*host)
            for array in host:
                array.fill(99)  # as who prepares the next batch may do at once
        feed.take()
        if ahead:
            feed.send(*filled(step + 1))  # before the step reads
        seen += [[array.copy() for array in feed.arrays] for _ in range(2)]  # it reads twice
    for number, arrays in enumerate(seen):
        for array, expected in zip(arrays, filled(number // 2), strict=True):
            assert array.get().tobytes() == expected.tobytes()


def test_what_used_the_memory_before_is_done_when_input_arrives(device):
    xp, nbytes = device.xp, APART * len(like())
    for _ in range(4):
        before = [xp.zeros(nbytes, "uint8") for _ in range(2)]
        for array in before:
            array += 1
        del before, array
        feed = Feed(device, like())
        feed.send(*filled(3))
        feed.take()
        for array, expected in zip(feed.arrays, filled(3), strict=True):
            assert array.get().tobytes() == expected.tobytes()
        del feed, array


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_waits_but_for_pinned_memory_of_three_steps_ago(seed):
    device = Device(SimulatedCupy(seed=seed))
    feed = Feed(device, like())
    with device.xp.watched() as first:
        for step in range(3):
            feed.send(*filled(step))
            feed.take()
    with device.xp.watched() as fourth:
        feed.send(*filled(3))
        feed.take()
    assert first.waits == []
    assert len(fourth.waits) == 1
    for seen in (first, fourth):
        assert seen.uploads == []  # from memory that can be paged
        assert seen.pooled == []


def test_arrays_of_another_shape_or_type_are_not_fed(device):
    feed = Feed(device, [np.zeros((2, 3), np.float32)])
    with pytest.raises(AssertionError, match="not of the shape"):
        feed.send(np.zeros((1, 3), np.float32))
    with pytest.raises(TypeError, match="Cannot cast"):
        feed.send(np.zeros((2, 3), np.float64))


def test_values_that_are_read_late_are_those_of_their_step(device):
    x: Any = device.xp.zeros(2, "float64")
    late = []
    for _ in range(5):
        x += 1
        late.append(LateValues(device, x))
    for step, value in enumerate(late):
        np.testing.assert_array_equal(value.values(), [step + 1] * 2)
    assert late[-1].arrived
