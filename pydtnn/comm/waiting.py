"""How ranks wait for others: in the MPI library, which polls, or asleep between tests.

Where ranks have cores of their own, polling is fastest. Where they share cores, ranks that poll
keep others from computing, and one that yields its core notices a message only when the system next
runs it, up to 4 ms later. Ranks that sleep do neither; they notice a message late by at most a
quarter of the time for which they have waited.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from pydtnn.utils.names import unknown

MIN_SLEEP_S, MAX_SLEEP_S = 20e-6, 300e-6
"""Times of sleep between two tests, in s."""


VARIABLE = "PYDTNN_WAIT"
"""Environment variable with one of `MODES`, by default the first one."""

MODES = ("poll", "sleep")

SLACK = 29, 1000
"""PR_SET_TIMERSLACK, and by how many ns Linux may lengthen a sleep; its default is 50,000."""


def sleeps() -> bool:
    """Return whether ranks of this process sleep while they wait.

    Raises
    ------
    ValueError
        If the environment variable is not one of `MODES`.
    """
    mode = os.environ.get(VARIABLE) or MODES[0]
    if mode not in MODES:
        raise ValueError(unknown(VARIABLE, mode, MODES))
    if mode == "sleep":
        prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
        if prctl is not None:
            prctl(*SLACK, 0, 0, 0)
    return mode == "sleep"


def pause(waited: float) -> float:
    """Return for how long a rank sleeps that has waited for some time, in s."""
    return min(max(waited / 4, MIN_SLEEP_S), MAX_SLEEP_S)


def number_of_tests(waited: float, each: float) -> float:
    """Return the number of tests in a wait of `sleep_until`.

    Parameters
    ----------
    waited : float
        Duration of the wait, in s.
    each : float
        Time of a test, and by which a sleep is too long, in s.
    """
    passed, count = 0.0, 0
    while passed < waited and pause(passed) < MAX_SLEEP_S:
        passed += pause(passed) + each
        count += 1
    return count + max(waited - passed, 0.0) / (MAX_SLEEP_S + each)


def sleep_until(test: Callable[[], object]) -> None:
    """Call a test until it is true, with sleep between the calls."""
    if test():
        return
    begin = time.perf_counter()
    while not test():
        time.sleep(pause(time.perf_counter() - begin))


def call_asleep(comm: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make a blocking collective call of an MPI communicator without polling in it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    call : callable
        A method of `comm`, or a function that calls collective methods.
    args : tuple
        Its arguments, kept alive here: the requests of mpi4py 4.1 do not, for reductions.
    """
    name = call.__name__  # such as Bcast, which has a counterpart Ibcast; not those of objects
    if name[0].isupper():
        sleep_until(getattr(comm, f"I{name.lower()}")(*args).Test)
        return None
    sleep_until(comm.Ibarrier().Test)
    return call(*args)
