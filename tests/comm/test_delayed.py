"""Communicators around others keep the contract: one that delays, one that watches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.wrapper import Delayed
from pydtnn.testing.calls import CallLog, Recording
from tests.comm.communicator_contract import contract
from tests.each import each


@pytest.mark.threads(3)
class TestDelayed(contract(lambda comm: Delayed(comm, seed=1, longest=1e-4))):
    pass


@pytest.mark.threads(3)
class TestRecording(contract(lambda comm: Recording(comm, CallLog()))):
    pass


def test_ranks_meet_in_many_orders() -> None:
    def arrivals(comm: Communicator, clock: Any) -> list[int]:
        times = []
        for _ in range(8):
            Delayed.delay(comm)
            times.append(next(clock))
            comm.inner.barrier()
        return times

    def rank(comm: Communicator, clock: Any) -> list[int]:
        return arrivals(Delayed(comm, longest=2e-3), clock)

    first, second = run_threads(2, rank, itertools.count())
    assert len({a < b for a, b in zip(first, second, strict=True)}) == 2


MISUSE: list[tuple[str, Callable[[Communicator, np.ndarray], Any]]] = [
    ("allreduce of 3 float64 was modified before", lambda comm, x: x.fill(1)),
    (
        "uses an array of iallreduce of 3 float64, which is not complete",
        lambda comm, x: comm.iallreduce(x),
    ),
    (
        "uses an array of iallreduce of 3 float64, which is not complete",
        lambda comm, x: comm.isend(x[:1], 0),
    ),
]


@each(("sentence", "misuse"), MISUSE)
def test_an_array_is_not_used_while_it_is_under_way(sentence: str, misuse: Any) -> None:
    def rank(comm: Communicator) -> None:
        x, log = np.ones(3), CallLog()
        request = Recording(comm, log).iallreduce(x)
        misuse(Recording(comm, log), x)
        request.wait()

    with pytest.raises(RuntimeError, match=sentence):
        run_threads(1, rank)


def test_what_is_read_too_early_is_no_number() -> None:
    def rank(comm: Communicator) -> tuple[float, float]:
        x = np.ones(1)
        request = Recording(comm, CallLog()).iallreduce(x)
        early = x[0]
        request.wait()
        return early, x[0]

    for early, late in run_threads(2, rank):
        assert np.isnan(early)
        assert late == 2
