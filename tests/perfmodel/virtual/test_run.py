"""Programs on virtual ranks: values of threads, times of the network."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, create_communicator, run_threads
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.virtual import run_virtual
from pydtnn.training.trainer import Trainer
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, RankError
from tests.each import each
from tests.perfmodel.virtual.costs import UniformCosts, cluster
from tests.small_training import small_data, small_model


def virtual(function: Any, hosts: str, *args: Any) -> Any:
    return run_virtual(function, *args, network=cluster(hosts), costs=UniformCosts())


def sum_by(comm: Communicator, algorithm: str, n: int) -> tuple[float, float]:
    array = np.full(n, comm.rank, "float32")
    scheduled = Scheduled(comm, algorithm)
    comm.barrier()
    begin = clock.now()
    scheduled.allreduce(array)
    return array[0], clock.now() - begin


@each("hosts", ["aa", "abc", "aabb", "abcdefgh"])
@each("algorithm", SCHEDULES)
@each("n", [240, 2_400_000])
def test_a_sum_by_a_schedule_takes_the_time_of_its_replay(algorithm, hosts, n):
    result = virtual(sum_by, hosts, algorithm, n)
    assert {total for total, _ in result.results} == {sum(range(len(hosts)))}
    expected = cost(algorithm, 4 * n, cluster(hosts))
    measured = max(seconds for _, seconds in result.results)
    assert measured == pytest.approx(expected, rel=1e-3)  # parts have whole numbers of elements


def test_a_message_takes_latency_and_bandwidth():
    def send(comm: Communicator) -> float:
        array, begin = np.zeros(12_500_000, "u1"), clock.now()
        (comm.send if comm.rank == 0 else comm.recv)(array, 1 - comm.rank)
        return clock.now() - begin

    assert virtual(send, "ab").results == pytest.approx([0.1001] * 2, rel=1e-6)
    assert virtual(send, "aa").results == pytest.approx([0.001251] * 2, rel=1e-6)


def test_messages_share_the_network_card_of_a_host():
    def send(comm: Communicator) -> float:
        array, begin = np.zeros(12_500_000, "u1"), clock.now()
        (comm.send if comm.rank < 2 else comm.recv)(array, (comm.rank + 2) % 4)
        return clock.now() - begin

    assert virtual(send, "aabb").results == pytest.approx([0.2001] * 4, rel=1e-6)
    assert virtual(send, "abcd").results == pytest.approx([0.1001] * 4, rel=1e-6)


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


def train(comm: Communicator, exact: bool = False) -> tuple[str, float, float]:
    model = small_model()
    trainer = Trainer(model, "sgd", progress=False)
    begin = time.perf_counter()
    trainer.fit(*small_data(), batch_size=4, epochs=2, loader_threads=0)
    values = b"".join(buffer.values.tobytes() for buffer in model.buffers)
    wall = time.perf_counter() - begin
    return hashlib.sha256(values).hexdigest(), trainer.seconds["steps"], wall


@each("hosts", ["a", "aa", "aaa"])
def test_training_has_the_bytes_of_threads_and_the_time_of_the_model(hosts):
    result = virtual(train, hosts)
    expected = run_threads(len(hosts), train)
    assert [one[0] for one in result.results] == [one[0] for one in expected]
    (steps,) = {round(one[1], 6) for one in result.results}
    assert 0.2 < steps < 10


@each("hosts", ["ab", "aabb", "abc"])
def test_every_run_has_the_same_bytes_and_times(hosts):
    first, *others = [virtual(train, hosts) for _ in range(3)]
    for other in others:
        assert [one[:2] for one in other.results] == [one[:2] for one in first.results]
        assert other.seconds == first.seconds


def test_a_slower_network_takes_longer():
    def seconds(bandwidth: float) -> float:
        network = Network.create("abcd", latency=1e-4, bandwidth=bandwidth)
        return max(run_virtual(train, network=network, costs=UniformCosts()).seconds)

    assert seconds(1e4) > 1.5 * seconds(1e8)


def test_the_communicator_of_a_rank_is_found():
    assert virtual(lambda comm: create_communicator() is comm, "ab").results == [True, True]
    assert create_communicator().size == 1


def test_ranks_that_wait_for_each_other_are_listed():
    def rank(comm: Communicator) -> None:
        array = np.zeros(3)
        comm.recv(array, 1 - comm.rank)

    told = "wait for each other at virtual time .* s: rank 0 in recv from .* rank 1 in recv"
    with pytest.raises(RuntimeError, match=told):
        virtual(rank, "ab")


def test_different_calls_are_an_error():
    def rank(comm: Communicator) -> None:
        comm.barrier() if comm.rank else comm.broadcast(np.zeros(3))

    with pytest.raises(RankError, match="rank 0 calls broadcast of 3 float64 .* calls barrier"):
        virtual(rank, "ab")


def test_messages_of_another_length_are_an_error():
    def rank(comm: Communicator) -> None:
        array = np.zeros(3 + comm.rank)
        (comm.send if comm.rank == 0 else comm.recv)(array, 1 - comm.rank)

    with pytest.raises(RankError, match="rank 1: .*expected a message of 32 bytes, got 24"):
        virtual(rank, "ab")


def test_the_error_of_a_rank_ends_the_others():
    def rank(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("broken")
        comm.barrier()

    with pytest.raises(RankError, match="rank 1: broken"):
        virtual(rank, "abc")


def test_an_error_of_all_ranks_is_raised_unchanged():
    def rank(comm: Communicator) -> None:
        raise AgreedError("all")

    with pytest.raises(AgreedError, match="^all$"):
        virtual(rank, "ab")
