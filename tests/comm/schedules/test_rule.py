"""The rule: what it chooses, that sums between emulated hosts are right and repeat to the byte."""

import threading

import ml_dtypes
import numpy as np
import pytest

from pydtnn.comm import create_communicator, mpi, run_threads
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.rule import (
    MAX_DIRECT_HOSTS,
    MAX_VENDOR_BYTES,
    MIN_FIRST_BUCKET_BYTES,
    VENDOR,
    Ruled,
    bucket_bytes,
    by_rule,
    choose,
    create_allreduce,
    explain,
)
from tests.comm.communicator_contract import CommunicatorContract, total, whole
from tests.each import each

HOSTS = ("ab", "aab", "abab", "aaabbc", "abcdefghi")
F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.threads(3, through=lambda comm: Ruled(comm, "hierarchical"))
class TestRuled(CommunicatorContract):
    pass


@each(
    ("hosts", "nbytes", "dtype", "expected"),
    [
        ("a", 10**6, F32, VENDOR),
        ("aaaa", 10**9, F32, VENDOR),
        ("aabb", MAX_VENDOR_BYTES, F32, VENDOR),
        ("aabb", MAX_VENDOR_BYTES + 1, F32, "hierarchical"),
        ("aabb", 2, F16, "hierarchical"),
        ("aab", 10**6, BF16, "hierarchical"),
        ("abcd", 10**6, F32, "direct"),
        (range(MAX_DIRECT_HOSTS), 10**6, F32, "direct"),
        (range(MAX_DIRECT_HOSTS + 1), 10**6, F32, "hierarchical"),
        (range(MAX_DIRECT_HOSTS + 1), 8, F32, VENDOR),
    ],
)
def test_hosts_length_and_type_decide(hosts, nbytes, dtype, expected):
    assert choose(hosts, nbytes, dtype) == expected
    assert expected in (VENDOR, *SCHEDULES)


def test_the_first_bucket_between_hosts_is_an_eighth_of_the_gradients_within_limits():
    usual = 1 << 20
    for gradients in (1, 10**5, 10**6, 10**9):
        assert bucket_bytes("aaa", gradients, usual) == (usual,)
    assert bucket_bytes("ab", 2_000_000, usual) == (250_000, 750_000)
    assert bucket_bytes("ab", 10_000, usual) == (MIN_FIRST_BUCKET_BYTES, 3 * MIN_FIRST_BUCKET_BYTES)
    assert bucket_bytes("ab", 5_000_000, usual) == (625_000, usual)
    assert bucket_bytes("ab", 10**9, usual) == (usual, usual)


@each(
    ("hosts", "words"),
    [
        ("aa", "vendor: all ranks share a host"),
        ("aabb", "hierarchical, vendor up to 8 KiB: there are 2 hosts of 2 ranks"),
        ("abc", "direct, vendor up to 8 KiB: there are 3 hosts of 1 rank"),
        ("aabaa", "hierarchical, vendor up to 8 KiB: there are 2 hosts of 1 to 4 ranks"),
    ],
)
def test_the_rule_says_why(hosts, words):
    assert explain(hosts) == words


@each("dtype", [F32, np.dtype("float64"), np.dtype("int32"), F16, BF16])
@each("hosts", HOSTS)
def test_sums_between_hosts_are_exact_where_they_can_be(hosts, dtype):
    limit = MAX_VENDOR_BYTES // dtype.itemsize
    lengths = (1, 7, limit, limit + 1, 40_009)

    def sums(comm):
        ruled = by_rule(comm)
        waiting, blocking = ([whole(comm.rank, n, dtype) for n in lengths] for _ in range(2))
        requests = [ruled.iallreduce(x) for x in waiting]  # all under way at once
        for x in blocking:
            ruled.allreduce(x)
        for request in requests:
            request.wait()
        for n, x, y in zip(lengths, waiting, blocking, strict=True):
            short = n * dtype.itemsize <= MAX_VENDOR_BYTES and dtype.itemsize > 2
            assert (ruled._algorithm_for(x) is None) == short
            np.testing.assert_array_equal(x, total(comm, n, dtype))
            np.testing.assert_array_equal(y, total(comm, n, dtype))

    run_threads(len(hosts), sums, hosts=hosts)


def test_groups_follow_the_rule_on_their_own_hosts():
    def describe(comm):
        ruled = by_rule(comm)
        inside, across = ruled.split_by_host(), ruled.split(comm.local_rank)
        x = np.ones(MAX_VENDOR_BYTES)
        across.allreduce(x)
        return type(inside) is type(comm), across.algorithm, x[-1]

    assert run_threads(4, describe, hosts="aabb") == [(True, "direct", 2)] * 4


def test_other_names_take_the_place_of_the_rule():
    def create(comm):
        ruled = by_rule(comm)
        assert create_allreduce("rule", ruled) is ruled
        assert create_allreduce("vendor", ruled) is comm
        ring = create_allreduce("ring", ruled)
        assert ring.inner is comm
        with pytest.raises(ValueError, match=r"unknown allreduce 'rign'; did you mean 'ring'\?"):
            create_allreduce("rign", comm)
        return type(ruled), type(ring)

    assert run_threads(2, create, hosts="ab") == [(Ruled, Scheduled)] * 2


@each("hosts", ["aab", "aaa"])
def test_the_communicator_of_all_ranks_follows_the_rule(monkeypatch, hosts):
    """Ranks and their hosts are those of threads; MPI would make them the same way."""
    current = threading.local()
    monkeypatch.setattr(mpi, "create_mpi", lambda timeout: current.comm)

    def create(comm):
        current.comm = comm
        made = create_communicator("mpi")
        return made is comm, isinstance(made, Ruled)

    expected = (True, False) if len(set(hosts)) == 1 else (False, True)
    assert run_threads(3, create, hosts=hosts) == [expected] * 3
