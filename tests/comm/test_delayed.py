"""Communicators around others keep the contract: one that delays, one that watches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.wrapper import Delayed
from pydtnn.tools.testing.calls import CallLog, CallRecorder
from tests.comm.communicator_contract import CommunicatorContract
from tests.each import each


@pytest.mark.threads(3, through=lambda comm: Delayed(comm, seed=1, longest=1e-4))
class TestDelayed(CommunicatorContract):
    pass


@pytest.mark.threads(3, through=lambda comm: CallRecorder(comm, CallLog()))
class TestRecording(CommunicatorContract):
    pass


def test_ranks_meet_in_many_orders():
    def rank(comm: Communicator, clock: Any) -> list[int]:
        delayed, times = Delayed(comm, longest=2e-3), []
        for _ in range(8):
            delayed.delay()
            times.append(next(clock))
            comm.barrier()
        return times

    first, second = run_threads(2, rank, itertools.count())
    assert len({a < b for a, b in zip(first, second, strict=True)}) == 2


@each(
    ("sentence", "misuse"),
    [
        ("of 3 float64 was modified before", lambda comm, x: x.fill(1)),
        ("uses an array of iallreduce of 3 float64", lambda comm, x: comm.iallreduce(x)),
        ("uses an array of iallreduce of 3 float64", lambda comm, x: comm.isend(x[:1], 0)),
    ],
)
def test_an_array_is_not_used_while_it_is_under_way(sentence, misuse):
    def rank(comm: Communicator) -> None:
        x, recording = np.ones(3), CallRecorder(comm, CallLog())
        request = recording.iallreduce(x)
        misuse(recording, x)
        request.wait()

    with pytest.raises(RuntimeError, match=sentence):
        run_threads(1, rank)


def test_what_is_read_too_early_is_no_number():
    def rank(comm: Communicator) -> tuple[float, float]:
        x = np.ones(1)
        request = CallRecorder(comm, CallLog()).iallreduce(x)
        early = x[0]
        request.wait()
        return early, x[0]

    for early, late in run_threads(2, rank):
        assert np.isnan(early)
        assert late == 2


def test_a_request_is_complete_once_the_inner_one_is():
    def rank(comm: Communicator) -> float:
        x = np.zeros(1)
        request = Delayed(comm, longest=0.0).irecv(x, 0)
        assert not request.test()
        comm.isend(np.ones(1), 0).wait()
        while not request.test():
            pass
        return x[0]

    assert run_threads(1, rank) == [1.0]
