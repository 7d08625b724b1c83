"""How many threads a process gets without asking other ranks."""

import os
from fractions import Fraction

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from pydtnn.utils import threads


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_one_process_takes_no_more_than_its_share_of_a_control_group(monkeypatch):
    monkeypatch.setattr(threads, "cores_here", lambda: [*range(64)])
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(threads, "cpu_quotas", lambda: {"pod": Fraction(9, 2)})
    assert threads.default_threads() == 4
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert threads.default_threads() == 2


@pytest.mark.parametrize("wish", ["3", " 3 ", "3,2"])
def test_omp_num_threads_wins(monkeypatch, wish):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    assert threads.default_threads() == 3


@pytest.mark.parametrize("wish", ["0", "-1", "many", ","])
def test_omp_num_threads_that_is_no_number_is_refused(monkeypatch, wish):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS: expected a positive number"):
        threads.default_threads()


def test_more_threads_than_a_process_bears_are_refused(monkeypatch):
    """A hundred thousand of OpenMP's end the interpreter."""
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS: the number must be at most 1024"):
        threads.default_threads()


def test_blas_is_limited_as_long_as_one_wants():
    np.ones((2, 2)) @ np.ones((2, 2))  # loads the library

    def pools():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threads.limit_blas_threads(2):
        assert pools() == {2}
        with threads.limit_blas_threads(1):
            assert pools() == {1}
        assert pools() == {2}


def test_ranks_of_a_host_share_its_cores_by_the_launchers_word(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "cores_here", lambda: list(range(os.cpu_count())))
    monkeypatch.setenv("MPI_LOCALNRANKS", str(2 * os.cpu_count()))
    assert threads.default_threads() == 1
    monkeypatch.setattr(threads, "cores_here", lambda: list(range(3)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert threads.default_threads() == 3  # pinned to cores of its own


def test_where_srun_does_not_say_how_many_are_here_cores_suffice_for_all(monkeypatch):
    monkeypatch.delenv("MPI_LOCALNRANKS", raising=False)
    monkeypatch.setattr(threads, "cores_here", lambda: list(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("PMI_SIZE", "4")
    assert threads.default_threads() == 2
