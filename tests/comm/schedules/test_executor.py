"""Schedules carried out: the sums are right, whatever else is under way and however one waits."""

import ml_dtypes
import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.schedules import SCHEDULES, executor
from pydtnn.comm.schedules.executor import ACTIVE, Scheduled
from pydtnn.comm.schedules.steps import ALL, add, part, receive, send
from tests.comm.communicator_contract import CommunicatorContract, total, whole
from tests.each import each

TYPES = ("float32", "float64", "float16", ml_dtypes.bfloat16, "int32")


def scheduled(comm):
    return Scheduled(comm, "halving_doubling", 100_000, 3)


@pytest.mark.threads(1, 3, through=scheduled)
@pytest.mark.mpi(2, through=scheduled)
class TestScheduled(CommunicatorContract):
    pass


def check_sums(comm, algorithm, dtypes, lengths, chunk_bytes=1 << 20):
    scheduled = Scheduled(comm, algorithm, chunk_bytes, active=2)
    for dtype in dtypes:
        for n in lengths:
            x = whole(comm.rank, n, dtype)
            scheduled.allreduce(x)
            np.testing.assert_array_equal(x, total(comm, n, dtype))


@pytest.mark.few(7)
@pytest.mark.threads(*range(1, 18))
def test_every_algorithm_sums_on_1_to_17_threads(comm):
    """Each on some numbers of ranks: that algorithms are right is tested without threads."""
    for number, algorithm in enumerate(SCHEDULES):
        if (comm.size + number) % 4 == 0:
            check_sums(comm, algorithm, TYPES, (53,))
            check_sums(comm, algorithm, ["float32"], (0, 1, 2))  # fewer elements than ranks
            check_sums(comm, algorithm, ["float32"], (300,), chunk_bytes=400)  # 3 chunks of 100


@pytest.mark.mpi(3, 4)
@each("algorithm", SCHEDULES)
def test_every_algorithm_sums_over_mpi(comm, algorithm):
    check_sums(comm, algorithm, ["float32", ml_dtypes.bfloat16], (1, 53))
    check_sums(comm, algorithm, ["float64"], (500,), chunk_bytes=2000)  # 2 chunks of 250


@pytest.mark.threads(2, 5)
@pytest.mark.mpi(2)
@each("algorithm", SCHEDULES)
def test_all_ranks_get_the_same_bytes_every_time(comm, algorithm):
    scheduled = Scheduled(comm, algorithm, chunk_bytes=2000)
    mine = np.random.default_rng(comm.rank).standard_normal(1013).astype("float32")
    results = set()
    for _ in range(2):
        x = mine.copy()
        scheduled.allreduce(x)
        results |= set(comm.gather_object(x.tobytes()))
    assert len(results) == 1


@pytest.mark.threads(3)
def test_groups_may_start_sums_in_an_order_that_goes_round(comm):
    root, rank = Scheduled(comm, "ring", chunk_bytes=1000), comm.rank
    # Ranks 0 and 1, 1 and 2, 2 and 0.
    pairs = [root.split(int(rank in (first, (first + 1) % 3))) for first in range(3)]
    arrays = [np.ones(1013), np.ones(1013)]
    # Each starts the sum with the rank after it, then that with the rank before it.
    requests = [
        pairs[pair].iallreduce(x) for pair, x in zip((rank, (rank - 1) % 3), arrays, strict=True)
    ]
    for request in requests:
        request.wait()
    np.testing.assert_array_equal(arrays, 2)


@pytest.mark.threads(3)
@pytest.mark.mpi(3)
def test_a_call_on_a_group_does_not_wait_for_the_sums_of_another(comm):
    root = Scheduled(comm, "ring", chunk_bytes=1000)
    pair, others, x = root.split(int(comm.rank < 2)), root.split(int(comm.rank != 1)), np.ones(1013)
    if comm.rank == 0:
        request = pair.iallreduce(x)
        others.barrier()  # before rank 1 begins to sum
        request.wait()
    elif comm.rank == 1:
        root.recv(np.empty(1), 2)
        pair.allreduce(x)
    else:
        others.barrier()
        root.send(np.ones(1), 1)
    if comm.rank < 2:
        np.testing.assert_array_equal(x, 2)


@pytest.mark.threads(2)
def test_tags_may_come_round(comm, monkeypatch):
    monkeypatch.setattr(executor, "MAX_TAG", 10)
    scheduled = Scheduled(comm, "ring", chunk_bytes=400)
    x = whole(comm.rank, 1013)  # 20 chunks
    scheduled.allreduce(x)
    np.testing.assert_array_equal(x, total(comm, 1013))


@pytest.mark.threads(2)
@pytest.mark.mpi(2)
def test_messages_of_a_pair_meet_in_their_order_whatever_their_rounds(comm):
    def uneven(group):
        """Rank 0 sends in two rounds what rank 1 receives in one, and all comes back at once."""
        first, second = part(0, 2), part(1, 2)
        if group.rank == 0:
            yield (send(1, first),)
            yield (send(1, second),)
            yield (receive(1, ALL),)
        else:
            yield add(0, first), add(0, second)
            yield (send(0, ALL),)

    x = whole(comm.rank, 1013)
    Scheduled(comm, uneven, chunk_bytes=1000).allreduce(x)
    np.testing.assert_array_equal(x, total(comm, 1013))


def test_chunks_take_turns_inside_a_host_and_travel_together_between_hosts():
    def active(comm):
        scheduled = Scheduled(comm, "ring")
        return scheduled.active, scheduled.split_by_host().active

    assert run_threads(2, active, hosts="aa") == [(1, 1)] * 2
    assert run_threads(3, active, hosts="aab") == [(ACTIVE, 1)] * 3


def test_groups_follow_the_algorithm_on_their_own_hosts():
    def describe(comm):
        group = Scheduled(comm, "hierarchical").split(comm.rank % 2)
        x = np.ones(53)
        group.allreduce(x)
        return type(group).__name__, group.algorithm, group.hosts, x[52]

    one, other = ("Scheduled", "hierarchical", (0, 1), 2), ("Scheduled", "hierarchical", (0, 1), 2)
    assert run_threads(4, describe, hosts="aabb") == [one, other, one, other]
