"""Comparison of the clocks of ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.tools.tracing import RankTrace
from pydtnn.tools.tracing.records import RECORD
from pydtnn.tools.tracing.writing import ClockReading, describe_clock, read_clock
from pydtnn.utils.clock import Clock, use


@pytest.mark.few(2)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2, 4)
def test_ranks_of_one_host_have_the_same_clock(comm):
    reading = read_clock(comm)
    assert reading.time <= time.perf_counter_ns()
    assert (reading.offset, reading.error) == (0, 0)


def test_ranks_of_other_hosts_are_compared_once_per_host():
    readings = run_threads(4, read_clock, hosts=["a", "b", "b", "a"])
    assert readings[0] == readings[3]
    assert readings[1] == readings[2]
    assert readings[0].error == 0 < readings[1].error
    assert abs(readings[1].offset) <= readings[1].error  # they are threads: the clock is the same


def test_the_offset_of_a_clock_is_found():
    ahead = 10**9  # rank 1's clock is ahead by a second

    class Ahead(Clock):
        def now_ns(self) -> int:
            return time.perf_counter_ns() + ahead

    def rank(comm: Communicator) -> ClockReading:
        if comm.rank == 1:
            use(Ahead())
        return read_clock(comm)

    first, second = run_threads(2, rank)
    assert (first.offset, first.error) == (0, 0)
    assert abs(second.offset - ahead) <= second.error < ahead


def test_times_are_converted_with_offset_and_drift():
    start, stop = ClockReading(1_000_000, 500, 20), ClockReading(3_000_000, 700, 30)
    clock = describe_clock(start, stop)
    assert clock == {"offset": 500, "drift": 1e-4, "origin": 1_000_000, "error": 30}
    trace = RankTrace(np.zeros(0, RECORD), [], {"rank": 1, "clock": clock})
    assert trace.to_common(np.array([1_000_000, 3_000_000])).tolist() == [999_500, 2_999_300]


def test_without_a_second_comparison_there_is_no_drift():
    clock = describe_clock(ClockReading(1_000, 500, 20), None)
    assert clock == {"offset": 500, "drift": 0.0, "origin": 1_000, "error": 20}
