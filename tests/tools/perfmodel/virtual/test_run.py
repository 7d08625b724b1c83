"""Programs on virtual ranks: values of threads, times of the network."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, create_communicator, run_threads
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.tools.perfmodel.virtual.communicator import Copies
from pydtnn.training.trainer import Trainer
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, RankError
from tests.each import each
from tests.small_training import small_data, small_model
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


def virtual(function: Any, hosts: str, *args: Any) -> Any:
    return run_virtual(function, *args, network=cluster(hosts), costs=UniformCosts())


def sum_by(comm: Communicator, algorithm: str) -> float:
    array = np.full(240, comm.rank, "float32")
    Scheduled(comm, algorithm).allreduce(array)
    return array[0]


@each("hosts", ["aa", "abc", "aabb"])
@each("algorithm", SCHEDULES)
def test_virtual_ranks_execute_a_schedule(algorithm, hosts):
    assert {*virtual(sum_by, hosts, algorithm).results} == {sum(range(len(hosts)))}


def test_a_test_is_answered_for_the_time_of_the_rank():
    def rank(comm: Communicator, seconds: float) -> bool:
        array = np.zeros(12_500_000, "u1")
        request = (comm.isend if comm.rank == 0 else comm.irecv)(array, 1 - comm.rank)
        spend(comm, seconds)
        done = request.test()
        request.wait()
        return done

    assert virtual(rank, "ab", 0.1).results == [False, False]
    assert virtual(rank, "ab", 0.1002).results == [True, True]


def spend(comm: Communicator, seconds: float) -> None:
    """Advance the clock of a rank, as a layer with this compute time does."""
    observer = clock.virtual()
    observer.engine.spend(comm.rank, seconds)  # type: ignore[union-attr]


def train(comm: Communicator) -> tuple[str, float]:
    model = small_model()
    trainer = Trainer(model, "sgd", progress=False)
    trainer.fit(*small_data(), batch_size=4, epochs=2, loader_threads=0)
    values = b"".join(buffer.values.tobytes() for buffer in model.buffers)
    return hashlib.sha256(values).hexdigest(), trainer.seconds["steps"]


@each("hosts", ["a", "ab", "aaa"])
def test_training_has_the_bytes_of_threads_and_the_time_of_the_model(hosts):
    result, again = (virtual(train, hosts) for _ in range(2))
    expected = run_threads(len(hosts), train)
    assert [one[0] for one in result.results] == [one[0] for one in expected]
    (steps,) = {round(one[1], 6) for one in result.results}
    assert 0.2 < steps < 10
    assert (again.results, again.seconds) == (result.results, result.seconds)


def test_the_communicator_of_a_rank_is_found():
    assert virtual(lambda comm: create_communicator() is comm, "ab").results == [True, True]
    assert create_communicator().size == 1


@each(("hosts", "seconds"), [("ab", 0.1001), ("aa", 0.001251), ("aabb", 0.2001), ("abcd", 0.1001)])
def test_a_message_takes_latency_and_the_bandwidth_of_a_card_that_hosts_share(hosts, seconds):
    half = len(hosts) // 2

    def send(comm: Communicator) -> float:
        array, begin = np.zeros(12_500_000, "u1"), clock.now()
        (comm.send if comm.rank < half else comm.recv)(array, (comm.rank + half) % (2 * half))
        return clock.now() - begin

    assert virtual(send, hosts).results == pytest.approx([seconds] * len(hosts), rel=1e-6)


def test_a_rank_copies_messages_while_it_waits_for_others():
    copies = Copies(pending=2, waited=3.0)
    assert [copies.complete(2.0, 0.5), copies.complete(2.0, 0.5)] == [0.5, 0.5]
    assert copies.waited == copies.pending == 0


def broken(comm: Communicator) -> None:
    if comm.rank == 1:
        raise ValueError("broken")
    comm.barrier()


def agreed(comm: Communicator) -> None:
    raise AgreedError("all")


@each(
    ("rank", "error", "message"),
    [
        (broken, RankError, "rank 1: broken"),
        (agreed, AgreedError, "^all$"),  # of all ranks, unchanged
        (
            lambda comm: comm.recv(np.zeros(3), 1 - comm.rank),
            RuntimeError,
            "wait for each other at virtual time .* s: rank 0 in recv from .* rank 1 in recv",
        ),
        (
            lambda comm: comm.barrier() if comm.rank else comm.broadcast(np.zeros(3)),
            RankError,
            "rank 0 calls broadcast of 3 float64 .* calls barrier",
        ),
        (
            lambda comm: (comm.recv if comm.rank else comm.send)(
                np.zeros(3 + comm.rank), 1 - comm.rank
            ),
            RankError,
            "rank 1: .*expected a message of 32 bytes, got 24",
        ),
    ],
)
def test_an_error_of_a_rank_ends_the_others(rank, error, message):
    with pytest.raises(error, match=message):
        virtual(rank, "ab")
