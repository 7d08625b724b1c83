"""How many threads a rank gets."""

import os
from fractions import Fraction

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import pydtnn.comm.cores
from pydtnn.comm import create_communicator
from pydtnn.comm.cores import threads_per_rank
from pydtnn.comm.serial import Serial
from pydtnn.utils import threads


class Described(Serial):
    """A rank among others that are only described: their hosts and the cores they may run on."""

    def __init__(self, rank, cores, hosts, groups):
        super().__init__()
        self.rank, self.hosts, self.cores, self.groups = rank, hosts, cores, groups

    def gather_object(self, value):
        assert value == (self.hosts[self.rank], self.cores[self.rank], self.groups[self.rank])
        return list(zip(self.hosts, self.cores, self.groups, strict=True))


def threads_of_all(monkeypatch, cores, hosts=None, quotas=None):
    quotas = quotas or [{}] * len(cores)
    hosts = hosts or [0] * len(cores)
    result = []
    for rank, mine in enumerate(cores):
        monkeypatch.setattr(pydtnn.comm.cores, "cores_here", lambda mine=mine: mine)
        monkeypatch.setattr(pydtnn.comm.cores, "cpu_quotas", lambda rank=rank: quotas[rank])
        groups = [[*own] for own in quotas]
        result.append(threads_per_rank(Described(rank, cores, hosts, groups)))
    return result


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("cores", "hosts", "expected"),
    [
        ([[0, 1, 2, 3, 4, 5]] * 2, None, [3, 3]),
        ([[0, 1, 2, 3, 4, 5, 6]] * 3, None, [2, 2, 2]),
        ([[0, 1]] * 8, None, [1] * 8),
        ([[0, 1], [2, 3, 4]], None, [2, 3]),
        ([[0, 1, 2, 3]] * 3, [0, 0, 2], [2, 2, 4]),
        ([[0, 1, 2, 3], [0, 1, 2, 3], [2, 3]], None, [1, 1, 1]),
    ],
    ids=["shared", "a remainder", "more ranks than cores", "pinned", "two hosts", "overlapping"],
)
def test_ranks_share_the_cores_of_their_host(monkeypatch, cores, hosts, expected):
    assert threads_of_all(monkeypatch, cores, hosts) == expected


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ([{"pod": Fraction(4)}] * 2, [2, 2]),
        ([{"pod": Fraction(3, 2)}] * 2, [1, 1]),
        ([{"a": Fraction(5)}, {"b": Fraction(1, 2)}], [4, 1]),
        ([{"job": Fraction(6), "job/a": Fraction(2)}, {"job": Fraction(6)}], [2, 3]),
    ],
    ids=["shared", "less than one each", "one each", "a group within a group"],
)
def test_ranks_share_the_time_that_a_control_group_may_use(monkeypatch, quotas, expected):
    assert threads_of_all(monkeypatch, [[*range(8)]] * 2, quotas=quotas) == expected


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
    assert threads_of_all(monkeypatch, [[0]] * 2) == [3, 3]
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


def test_one_process_takes_the_cores_it_may_run_on():
    assert threads.default_threads() == threads_per_rank(create_communicator("serial"))


def test_blas_is_limited_as_long_as_one_wants():
    np.ones((2, 2)) @ np.ones((2, 2))  # loads the library
    before = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    with threads.limit_blas_threads(1):
        assert {p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"} == {1}
    after = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    assert before == after


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
