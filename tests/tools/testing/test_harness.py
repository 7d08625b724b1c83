"""The harness of tests on several ranks: a failure of any rank counts, and none hides another."""

import re
import subprocess
import sys

import pytest

from tests import launch

CONFTEST = "from tests.conftest import *\n"

TESTS = """
import os, time
import numpy as np
import pytest

pytestmark = pytest.mark.mpi(2)

def test_first_passes(comm):
    x = np.ones(3)
    comm.allreduce(x)
    assert x[0] == comm.size

def test_one_rank_fails(comm):
    comm.barrier()
    assert comm.rank == 0, "seen on the wrong rank"

def test_one_rank_skips(comm):
    if comm.rank == 1:
        pytest.skip("not here")

def test_one_rank_crashes(comm):
    if comm.rank == 1:
        os._exit(7)
    comm.barrier()

def test_ranks_wait_for_ever(comm):
    comm.recv(np.zeros(1), comm.rank)

def test_last_passes(comm):
    x = np.ones(3)
    comm.allreduce(x)
    assert x[0] == comm.size
"""


@pytest.fixture
def project(tmp_path):
    """A folder with tests of its own and our fixtures."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_ranks.py").write_text(TESTS)
    return tmp_path


ENVIRONMENT = {"PYTHONPATH": str(launch.ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.long  # its worlds wait for a rank until their patience is over
@pytest.mark.skipif(bool(launch.why_not()), reason=launch.why_not())
def test_a_plain_pytest_reports_every_test_of_every_rank(project, monkeypatch):
    monkeypatch.setenv("PYDTNN_TEST_PATIENCE", "15")  # on busy cores a crash is noticed late
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    progress, told = finished.stdout.split("= FAILURES =")
    outcomes = dict(re.findall(r"::test_(\w+)\[mpi2\] (\w+)", progress))
    assert outcomes == {
        "first_passes": "PASSED",
        "one_rank_fails": "FAILED",
        "one_rank_skips": "SKIPPED",
        "one_rank_crashes": "FAILED",
        "ranks_wait_for_ever": "FAILED",
        "last_passes": "PASSED",
    }
    assert "rank 1: AssertionError: seen on the wrong rank" in told
    assert "2 ranks: mpiexec ended with status" in told
    assert "2 ranks: no rank made progress for 15 s, so all were killed" in told
    assert finished.returncode == 1


def test_a_failure_ends_all_ranks_of_a_world_that_a_person_started(project, mpiexec):
    arguments = ["-m", "pytest", "-m", "mpi", "-q", "-p", "no:cacheprovider"]
    finished = mpiexec(2, arguments, environment=ENVIRONMENT, directory=project)
    assert finished.returncode != 0
    assert "rank 1: test_ranks.py::test_one_rank_fails[mpi2] failed" in finished.stderr
    assert "seen on the wrong rank" in finished.stderr
    assert "rank 0: " not in finished.stderr


def test_any_number_of_ranks_runs_the_tests_for_any_number(project, mpiexec):
    passing = TESTS.split("def test_one_rank_fails")[0].replace("(2)", "")
    (project / "test_ranks.py").write_text(passing)
    arguments = ["-m", "pytest", "-m", "mpi", "-q", "-p", "no:cacheprovider"]
    finished = mpiexec(5, arguments, environment=ENVIRONMENT, directory=project)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("1 passed") == 1  # one rank talks
