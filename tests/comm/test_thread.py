"""Ranks as threads: the contract, what happens when one fails, and what becomes of deadlocks."""

import threading
import time

import numpy as np
import pytest

from pydtnn.comm import create_communicator, run_threads
from pydtnn.utils.errors import AgreedError, RankError
from tests.comm.communicator_contract import CommunicatorContract
from tests.each import each


@pytest.mark.threads(1, 3)
class TestThread(CommunicatorContract):
    pass


def test_create_communicator_returns_that_of_the_thread():
    def same(comm):
        helper = []
        thread = threading.Thread(target=lambda: helper.append(create_communicator()))
        thread.start()
        thread.join()
        kinds = create_communicator() is comm, create_communicator("serial").size, helper[0].size
        return (*kinds, run_threads(2, lambda inner: create_communicator() is inner))

    assert run_threads(3, same) == [(True, 1, 1, [True, True])] * 3
    assert create_communicator().size == 1


def test_reductions_and_results_have_the_order_of_the_ranks():
    values = [1e16, 1.0, -1e16, 1.0]

    def reduce(comm, factor):
        x = np.array([values[comm.rank]])
        if comm.rank < 3:  # arrive in another order
            comm.recv(np.empty(1), comm.rank + 1)
        request = comm.iallreduce(x)
        if comm.rank > 0:
            comm.send(np.empty(1), comm.rank - 1)
        request.wait()
        return factor * comm.rank, x[0]

    # From left to right 1e16 + 1 is rounded to 1e16, so that only the last 1 is left.
    assert run_threads(4, reduce, 10) == [(0, 1.0), (10, 1.0), (20, 1.0), (30, 1.0)]


@each(
    "wait",
    [
        lambda comm: comm.barrier(),
        lambda comm: comm.recv(np.zeros(3), 1),
        lambda comm: comm.send(np.zeros(3), 1),
        lambda comm: spin(comm.irecv(np.zeros(3), 1)),
        lambda comm: spin(comm.iallreduce(np.zeros(3))),
    ],
)
def test_an_error_wakes_the_others_and_is_raised_with_its_rank(wait):
    def fail_on_rank_1(comm):
        if comm.rank == 1:
            time.sleep(0.01)
            raise KeyError("momentum")
        wait(comm)

    with pytest.raises(RankError, match=r"^rank 1: KeyError: 'momentum'") as caught:
        run_threads(3, fail_on_rank_1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)


def spin(request):
    while not request.test():
        time.sleep(0.001)


def test_an_agreed_error_is_raised_as_it_is_and_abort_ends_all_ranks():
    def fail(comm):
        raise AgreedError("the loss is not finite")

    def abort(comm):
        if comm.rank == 1:
            comm.abort(3)
        comm.barrier()

    with pytest.raises(AgreedError, match=r"^the loss is not finite$"):
        run_threads(2, fail)
    with pytest.raises(RankError, match="rank 1: aborted with status 3"):
        run_threads(2, abort)


def test_ranks_that_all_send_first_are_told_that_they_wait_for_each_other():
    def exchange(comm):
        comm.send(np.zeros(3), 1 - comm.rank)
        comm.recv(np.zeros(3), 1 - comm.rank)

    with pytest.raises(
        RuntimeError, match=r"wait for each other: rank 0 in send to rank 1 .*; rank 1"
    ):
        run_threads(2, exchange)


def test_a_rank_that_leaves_early_is_named_by_those_who_wait_for_it():
    def leave(comm):
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(RuntimeError, match=r"rank 0 in barrier \(without rank 1\); rank 2 in"):
        run_threads(3, leave)


@each(
    ("call", "words"),
    [
        (lambda comm: comm.allreduce(np.zeros(3 + comm.rank)), "allreduce sum of 3 float64 where"),
        (lambda comm: comm.broadcast(np.zeros(3), comm.rank), "from rank 1"),
        (lambda comm: [comm.barrier, comm.split_by_host][comm.rank](), "barrier where rank 1"),
    ],
)
def test_ranks_that_call_different_collectives_are_told_so(call, words):
    with pytest.raises(RankError, match=words):
        run_threads(2, call)


def test_a_rank_may_communicate_from_a_thread_of_its_own():
    def reduce_in_helper(comm):
        x = np.ones(3)
        group = comm.split(0)
        helper = threading.Thread(target=group.allreduce, args=(x,))
        helper.start()
        comm.barrier()
        helper.join()
        return x[0]

    assert run_threads(3, reduce_in_helper) == [3, 3, 3]


def test_ranks_may_pretend_to_be_on_different_hosts():
    def describe(comm):
        across = comm.split(comm.local_rank)
        return comm.hosts, comm.local_rank, comm.split_by_host().size, across.hosts

    assert run_threads(3, describe, hosts=["a", "a", "b"]) == [
        ((0, 0, 2), 0, 2, (0, 1)),
        ((0, 0, 2), 1, 2, (0,)),
        ((0, 0, 2), 0, 1, (0, 1)),
    ]


@each(("n", "hosts"), [(0, None), (2, ["a"])])
def test_impossible_groups_are_refused(n, hosts):
    with pytest.raises(ValueError, match=r"run_threads: expected"):
        run_threads(n, lambda comm: None, hosts=hosts)


def test_ranks_share_one_object_or_its_error():
    made = []

    def broken():
        raise ValueError("broken")

    def rank(comm):
        with pytest.raises(ValueError, match="broken"):
            comm.share(broken)
        return comm.share(lambda: made.append(comm.rank) or object())

    first, *others = run_threads(3, rank)
    assert all(other is first for other in others)
    assert made == [0]
