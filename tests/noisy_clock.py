"""Clocks that run up to eight times too fast or too slow: ``PYDTNN_NOISY_CLOCK=1 make test``.

Intervals between readings of a clock are multiplied by a factor that changes at random, so that a
test that compares measured times, or a deadline that is near, fails within a few runs, anywhere.
Commands that tests start, other than ranks of tests, have the clocks of the system.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MOST = 8.0

CHANGES = 0.05
"""Part of the readings at which the speed of a clock changes: other work lasts for a while."""

ABOUT_CLOCKS = (
    "tests/tools/tracing/test_clock.py",
    "tests/tools/tracing/test_recorder.py::test_a_record_contains_what_was_told_and_the_time",
    "tests/tools/tracing/test_writing.py::test_messages_of_processes_arrive_after_they_are_sent",
    "tests/test_docstrings.py::test_examples_have_the_results_that_are_written_below_them"
    "[pydtnn/tools/perfmodel/calibration/sample.py]",
)
"""Tests of readings that different processes, or Python and C, have of one clock."""


def noisy(clock: Callable[[], float], state: Any, rng: random.Random) -> Callable[[], float]:
    """Return a clock that never goes back, and whose speed changes at random."""
    lock = threading.Lock()

    def read() -> float:
        with lock:
            now = clock()
            before, shown, factor = getattr(state, "readings", (now, now, 1.0))
            if rng.random() < CHANGES:
                factor = MOST ** rng.uniform(-1, 1)
            shown += (now - before) * factor
            state.readings = now, shown, factor
            return shown

    return read


def install(seed: int) -> None:
    """Replace the clocks of `time` in this process."""
    for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
        state = threading.local() if name == "thread_time" else SimpleNamespace()
        rng = random.Random(1000 * os.getpid() + seed)
        clock = noisy(getattr(time, name), state, rng)
        setattr(time, name, clock)
        setattr(time, f"{name}_ns", lambda clock=clock: int(1e9 * clock()))
