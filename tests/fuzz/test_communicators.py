"""Random programs of communication on every communicator, compared with NumPy."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import run_threads
from tests.fuzz.communicators import run_case
from tests.random_cases import Case, Cases

pytestmark = pytest.mark.fuzz("communicators")


def compare_for(case: Case) -> Callable[[Any, Any], None]:
    """Count comparisons of several threads."""
    lock = threading.Lock()

    def compare(found: Any, expected: Any) -> None:
        with lock:
            case.compare(np.testing.assert_array_equal, found, expected)

    return compare


def seed_of(cases: Cases, case: Case) -> list[int]:
    return [zlib.crc32(cases.test.encode()), case.number]


def test_random_programs_on_threads_agree_with_numpy(cases):
    for case in cases:
        ranks = int(case.rng.integers(1, 7))
        hosts = [int(host) for host in case.rng.integers(0, 3, ranks)]
        seed, compare = seed_of(cases, case), compare_for(case)
        run_threads(ranks, run_case, seed, compare, hosts=hosts)


def test_random_programs_over_mpi_agree_with_numpy(cases, mpiexec):
    """One launch runs all cases, on 1 to 4 of its ranks each."""
    for case in cases:
        seconds = cases.seconds if cases.only is None else 0.0
        program = ["-m", "tests.fuzz.communicators", cases.test, str(case.number), str(seconds)]
        environment = {"OMP_NUM_THREADS": "1"}
        done = mpiexec(4, program, timeout=seconds + 300, environment=environment)
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout)
        case.comparisons += counts["comparisons"]
        cases.done += counts["cases"] - 1
