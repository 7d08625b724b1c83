"""Clocks that run up to eight times too fast or too slow: ``PYDTNN_NOISY_CLOCK=1 make test``.

Each interval between two readings of a clock is multiplied by a random factor, so that a test that
compares measured times, or a deadline that is near, fails within a run or two, on any machine.
Commands that tests start, other than ranks of tests, have the clocks of the system.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

MOST = 8.0

ABOUT_CLOCKS = (
    "tests/tools/tracing/test_clock.py",
    "tests/tools/tracing/test_recorder.py::test_a_record_contains_what_was_told_and_the_time",
    "tests/tools/tracing/test_writing.py::test_messages_of_processes_arrive_after_they_are_sent",
    "tests/test_docstrings.py::test_examples_have_the_results_that_are_written_below_them"
    "[pydtnn/tools/perfmodel/calibration/sample.py]",
)
"""Tests of readings that different processes, or Python and C, have of one clock."""


def noisy(clock: Callable[[], float], rng: random.Random) -> Callable[[], float]:
    """Return a clock that never goes back, each of whose intervals has an error of its own."""
    lock, before = threading.Lock(), clock()
    shown = before

    def read() -> float:
        nonlocal before, shown
        with lock:
            now = clock()
            shown += (now - before) * MOST ** rng.uniform(-1, 1)
            before = now
            return shown

    return read


def install(seed: int) -> None:
    """Replace the clocks of `time` in this process."""
    for name in ("perf_counter", "monotonic"):
        clock = noisy(getattr(time, name), random.Random(1000 * os.getpid() + seed))
        setattr(time, name, clock)
        setattr(time, f"{name}_ns", lambda clock=clock: int(1e9 * clock()))
