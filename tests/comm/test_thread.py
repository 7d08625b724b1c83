"""Ranks as threads: the contract, what happens when one fails, and what becomes of deadlocks."""

import threading
import time

import numpy as np
import pytest

from pydtnn.comm import create_communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError, RankError
from tests.comm.communicator_contract import CommunicatorContract
from tests.each import each


@pytest.mark.threads(1, 2, 3, 4, 5)
class TestThread(CommunicatorContract):
    pass


def test_results_come_in_the_order_of_the_ranks():
    def late_for_low_ranks(comm, factor):
        time.sleep(0.01 * (comm.size - comm.rank))
        return factor * comm.rank

    assert run_threads(3, late_for_low_ranks, 10) == [0, 10, 20]


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


def test_a_trainer_made_by_a_thread_trains_with_the_others():
    data = ArrayDataset(np.arange(24.0).reshape(8, 3), np.arange(8) % 2)

    def rank(comm):
        trainer = Trainer(Model(Linear(2), (3,), backend="numpy", seed=comm.rank), SGD(0.01))
        trainer.fit(data, batch_size=2)
        return trainer.comm.size, trainer.model.parameters["linear.w"].master.tobytes()

    (size, first), (_, second) = run_threads(2, rank)
    assert size == 2
    assert first == second


def test_reductions_add_from_the_first_rank_to_the_last():
    values = [1e16, 1.0, -1e16, 1.0]

    def reduce(comm):
        x = np.array([values[comm.rank]])
        time.sleep(0.003 * (3 - comm.rank))  # arrive in another order
        comm.allreduce(x)
        return x[0]

    # From left to right 1e16 + 1 is rounded to 1e16, so that only the last 1 is left.
    assert run_threads(4, reduce) == [1.0] * 4


@each(
    "wait",
    [
        lambda comm: comm.barrier(),
        lambda comm: comm.allreduce(np.zeros(3)),
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


def test_an_agreed_error_is_raised_as_it_is():
    def fail(comm):
        raise AgreedError("the loss is not finite")

    with pytest.raises(AgreedError, match=r"^the loss is not finite$"):
        run_threads(2, fail)


def test_abort_ends_all_ranks():
    def fail(comm):
        if comm.rank == 1:
            comm.abort(3)
        comm.barrier()

    with pytest.raises(RankError, match="rank 1: aborted with status 3"):
        run_threads(2, fail)


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
        (lambda comm: comm.allreduce(np.zeros(3), ["sum", "max"][comm.rank]), "allreduce max"),
        (lambda comm: comm.broadcast(np.zeros(3), comm.rank), "from rank 1"),
        (
            lambda comm: [comm.barrier, comm.split_by_host][comm.rank](),
            "barrier where rank 1 calls",
        ),
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


class Watched:
    """Something to wait for that counts how often it is asked whether it is complete."""

    def __init__(self) -> None:
        self.asked, self.complete, self.waiting = 0, False, []

    @property
    def done(self) -> bool:
        self.asked += 1
        return self.complete


def test_a_message_wakes_no_rank_but_its_receiver():
    """Ranks that wait for something else are not woken, so messages cost the same on any number."""
    watched = [Watched() for _ in range(20)]

    def rank(comm):
        if comm.rank >= 2:
            comm._world.wait_for(watched[comm.rank], comm.rank, lambda: "a wait")
            return
        x = np.zeros(3)
        for _ in range(50):
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
        if comm.rank == 0:
            for what in watched:
                with comm._world.lock:
                    what.complete = True
                    comm._world.wake(what)

    run_threads(20, rank)
    assert all(what.asked <= 2 for what in watched)


def test_messages_that_have_met_leave_nothing_behind():
    def rank(comm):
        for tag in range(20):
            request = comm.irecv(np.empty(1), 1 - comm.rank, tag)
            comm.send(np.empty(1), 1 - comm.rank, tag)
            request.wait()
        comm.barrier()
        matching = comm._group.mailbox._matching
        return [*matching._sends, *matching._receives]

    assert run_threads(2, rank) == [[], []]


def test_ranks_share_one_object():
    made = []

    def rank(comm):
        return comm.share(lambda: made.append(comm.rank) or object())

    first, *others = run_threads(3, rank)
    assert all(other is first for other in others)
    assert made == [0]


def test_an_error_of_a_shared_object_is_raised_on_all_ranks():
    def rank(comm):
        def broken():
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            comm.share(broken)

    run_threads(3, rank)
