from collections.abc import Iterator

import pytest

from pydtnn.perfmodel.compute import Label
from pydtnn.perfmodel.compute.segments import SegmentTimes
from pydtnn.utils.observer import Kind


def ticking(*times: int) -> Iterator[int]:
    """Each time twice: a notification reads the clock when it begins and when it ends."""
    for time in times:
        yield time
        yield time


def observed(times: tuple[int, ...]) -> SegmentTimes:
    clock = ticking(*times)
    return SegmentTimes(lambda: next(clock))


def test_a_segment_belongs_to_the_innermost_activity_and_is_numbered_within_it():
    times = observed((0, 10, 40, 100, 1000))
    times.begin(Kind.PHASE, "forward")
    times.begin(Kind.FORWARD, "conv")
    times.end()
    times.begin(Kind.FORWARD, "relu")
    times.end()
    assert {label: round(1e9 * seconds) for label, seconds in times.take().items()} == {
        Label("phase", "forward", 0): 10,
        Label("forward", "conv", 0): 30,
        Label("phase", "forward", 1): 60,
        Label("forward", "relu", 0): 900,
    }


def test_calls_of_the_communicator_end_a_segment_and_belong_to_none():
    times = observed((0, 10, 400, 430, 440))
    times.begin(Kind.FORWARD, "conv")
    times.begin(Kind.WAIT, "exchange")
    times.end()
    times.end()
    found = times.take()
    assert found == {
        Label("forward", "conv", 0): pytest.approx(10e-9),
        Label("forward", "conv", 1): pytest.approx(30e-9),
    }


def test_time_of_tests_of_requests_is_subtracted_from_the_segment_that_makes_them():
    times = observed((0, 100))
    times.begin(Kind.PHASE, "backward")
    times.traffic.seconds += 30e-9
    times.end()
    assert times.take() == {Label("phase", "backward", 0): pytest.approx(70e-9)}


def test_executions_of_an_activity_in_a_step_are_averaged():
    times = observed((0, 10, 20, 50))
    for _ in range(2):
        times.begin(Kind.PHASE, "update")
        times.end()
    assert times.take() == {Label("phase", "update", 0): pytest.approx(20e-9)}
    assert times.take() == {}


def test_kernels_do_not_end_a_segment():
    times = observed((0, 10))
    times.begin(Kind.FORWARD, "conv")
    times.begin(Kind.KERNEL, "conv.forward")
    times.end()
    times.end()
    assert list(times.take()) == [Label("forward", "conv", 0)]
