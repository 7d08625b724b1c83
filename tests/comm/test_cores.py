"""How the ranks of a host share its cores."""

from fractions import Fraction

import pytest

import pydtnn.comm.cores
from pydtnn.comm.cores import threads_per_rank
from pydtnn.comm.serial import Serial
from pydtnn.utils import machine
from tests.each import each


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
        monkeypatch.setattr(pydtnn.comm.cores, "available_cores", lambda mine=mine: mine)
        monkeypatch.setattr(pydtnn.comm.cores, "cpu_quotas", lambda rank=rank: quotas[rank])
        groups = [[*own] for own in quotas]
        result.append(threads_per_rank(Described(rank, cores, hosts, groups)))
    return result


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@each(
    ("cores", "hosts", "expected"),
    [
        ([[0, 1, 2, 3, 4, 5, 6]] * 3, None, [2, 2, 2]),
        ([[0, 1]] * 8, None, [1] * 8),
        ([[0, 1], [2, 3, 4]], None, [2, 3]),
        ([[0, 1, 2, 3]] * 3, [0, 0, 2], [2, 2, 4]),
        ([[0, 1, 2, 3], [0, 1, 2, 3], [2, 3]], None, [1, 1, 1]),
    ],
)
def test_ranks_share_the_cores_of_their_host(monkeypatch, cores, hosts, expected):
    assert threads_of_all(monkeypatch, cores, hosts) == expected


@each(
    ("quotas", "expected"),
    [
        ([{"pod": Fraction(4)}] * 2, [2, 2]),
        ([{"pod": Fraction(3, 2)}] * 2, [1, 1]),
        ([{"a": Fraction(5)}, {"b": Fraction(1, 2)}], [4, 1]),
        ([{"job": Fraction(6), "job/a": Fraction(2)}, {"job": Fraction(6)}], [2, 3]),
    ],
)
def test_ranks_share_the_time_that_a_control_group_may_use(monkeypatch, quotas, expected):
    assert threads_of_all(monkeypatch, [[*range(8)]] * 2, quotas=quotas) == expected


def test_omp_num_threads_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_all(monkeypatch, [[0]] * 2) == [3, 3]


def test_one_rank_takes_what_a_process_takes():
    assert threads_per_rank(Serial()) == machine.default_threads()
