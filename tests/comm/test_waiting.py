"""Ranks that sleep while they wait."""

from __future__ import annotations

import time

import pytest

from pydtnn.comm.waiting import (
    MAX_SLEEP_S,
    VARIABLE,
    call_asleep,
    number_of_tests,
    sleep_until,
    sleeps,
)
from tests.each import each


@each(("mode", "expected"), [(None, False), ("poll", False), ("sleep", True)])
def test_the_environment_says_how_ranks_wait(monkeypatch, mode, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    if mode:
        monkeypatch.setenv(VARIABLE, mode)
    assert sleeps() is expected


def test_an_unknown_way_to_wait_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "slep")
    with pytest.raises(ValueError, match="unknown PYDTNN_WAIT 'slep'; did you mean 'sleep'?"):
        sleeps()


def test_a_test_that_is_true_is_called_once():
    calls = []
    sleep_until(lambda: calls.append(0) or True)
    assert len(calls) == 1


@pytest.mark.measure
def test_waiting_takes_little_of_the_processor_and_ends_soon_after():
    end = time.perf_counter() + 0.05
    before = time.thread_time()
    sleep_until(lambda: time.perf_counter() > end)
    late = time.perf_counter() - end
    assert time.thread_time() - before < 0.025
    assert late < MAX_SLEEP_S + 0.02  # of a busy machine


class _Library:
    """Records the calls that an MPI communicator receives."""

    def __init__(self):
        self.calls = []

    def Bcast(self, array, root):
        raise AssertionError("polls")

    def Ibcast(self, array, root):
        self.calls.append(("Ibcast", array, root))
        return self

    def Ibarrier(self):
        self.calls.append(("Ibarrier",))
        return self

    def allgather(self, value):
        self.calls.append(("allgather", value))
        return [value]

    def Test(self):
        return len(self.calls) > 0


@each("waited", [0.0, 1e-5, 1e-3, 0.1, 3.0])
def test_the_number_of_tests_in_a_wait_is_that_of_the_loop(waited, monkeypatch):
    each, now, count = 5e-5, 0.0, 0

    def advance(seconds):
        nonlocal now
        now += seconds + each

    def over():
        nonlocal count
        count += 1
        return now >= waited and count > 1

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("time.sleep", advance)
    sleep_until(over)
    assert number_of_tests(waited, each) == pytest.approx(count - 2, abs=1)


def test_calls_of_arrays_have_a_form_that_does_not_block():
    library = _Library()
    assert call_asleep(library, library.Bcast, ("x", 1)) is None
    assert library.calls == [("Ibcast", "x", 1)]


def test_calls_of_objects_follow_a_barrier():
    library = _Library()
    assert call_asleep(library, library.allgather, (3,)) == [3]
    assert library.calls == [("Ibarrier",), ("allgather", 3)]
