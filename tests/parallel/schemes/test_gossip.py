"""Decentralised averaging does what Lian, Assran and Ying et al. say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.schemes import Gossip, GradientPush
from pydtnn.parallel.schemes.gossip import GRAPHS
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.parallel.schemes.course import (
    all_values,
    assert_close,
    data,
    simulate,
    train,
    train_serially,
    trainer_of,
)

RULES: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.2, weight_decay=0.02),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True),
}
"""Those that are linear in the gradients: the mean of the ranks' steps is the step of the mean."""


def matrix(graph: str, size: int, step: int) -> np.ndarray:
    """W of one step: row i says what rank i takes of every rank."""
    hops = GRAPHS[graph](size, step)
    w = np.zeros((size, size))
    for rank in range(size):
        for hop in (0, *hops):
            w[rank, (rank - hop) % size] += 1 / (1 + len(hops))
    return w


@each("graph", GRAPHS)
@each("size", range(1, 18))
def test_weights_are_doubly_stochastic_and_every_rank_is_reached(graph: str, size: int) -> None:
    product = np.eye(size)
    for step in range(2 * size):
        hops = GRAPHS[graph](size, step)
        assert len(set(hops)) == len(hops)
        assert all(0 < hop < size for hop in hops)
        w = matrix(graph, size, step)
        np.testing.assert_allclose(w.sum(axis=0), 1, rtol=1e-15)
        np.testing.assert_allclose(w.sum(axis=1), 1, rtol=1e-15)
        product = w @ product
    assert (product > 0).all()


@each("size", [2, 4, 8, 16])
def test_one_peer_graphs_of_a_power_of_2_are_an_exact_average_after_a_round(size: int) -> None:
    product = np.eye(size)
    for step in range(size.bit_length() - 1):
        product = matrix("one_peer", size, step) @ product
    np.testing.assert_allclose(product, 1 / size, rtol=1e-15)


@each("size", [5, 8, 13])
def test_the_exponential_graph_mixes_faster_than_the_ring(size: int) -> None:
    second = {g: np.sort(abs(np.linalg.eigvals(matrix(g, size, 0))))[-2] for g in GRAPHS}
    assert second["complete"] < second["exponential"] < second["ring"] < 1


@pytest.mark.few(6)
@pytest.mark.threads(1, 2, 3, 4, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("graph", GRAPHS)
def test_it_is_steps_followed_by_averages_with_neighbours(comm: Communicator, graph: str) -> None:
    def step(number: int, w: np.ndarray, grads, samples: np.ndarray) -> None:
        scale = comm.size / samples.sum()
        w[:] = matrix(graph, comm.size, number) @ (w - 0.2 * grads(scale))

    assert_close(train(Gossip(comm, graph=graph), SGD(0.2)), simulate(comm.size, 3, step))


@pytest.mark.few(3)
@pytest.mark.threads(1, 2, 3, 4, 5)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("rule", RULES)
def test_with_the_complete_graph_it_is_serial_sgd_uneven_tails_included(
    comm: Communicator, rule: str
) -> None:
    assert_close(
        train(Gossip(comm, graph="complete"), RULES[rule]()), train_serially(RULES[rule]())
    )


@pytest.mark.threads(2)
@each("graph", GRAPHS)
def test_two_ranks_are_each_others_only_neighbours(comm: Communicator, graph: str) -> None:
    assert_close(train(Gossip(comm, graph=graph), SGD(0.2)), train_serially(SGD(0.2)))


def mixing(comm: Communicator, graph: str, steps: int) -> tuple[list[float], np.ndarray, Trainer]:
    """Average without gradients; return distances from consensus and how far the mean went."""
    exchange = Gossip(comm, graph=graph)
    trainer = trainer_of(exchange, SGD(0.0))
    exchange.start(trainer.model.buckets)
    rng = np.random.default_rng(comm.rank)
    for bucket in trainer.model.buckets:
        for entry in bucket.parameters:
            bucket.values[entry.slice] = rng.normal(size=bucket.values[entry.slice].shape)
    first, distances = all_values(comm, trainer), []
    for _ in range(steps):
        exchange.update(trainer.optimizer)
        now = all_values(comm, trainer)
        distances.append(float(np.linalg.norm(now - now.mean(axis=0))))
    before = float(np.linalg.norm(first - first.mean(axis=0)))
    return [before, *distances], now.mean(axis=0) - first.mean(axis=0), trainer


@pytest.mark.threads(3, 5)
@each("graph", GRAPHS)
def test_ranks_come_closer_and_their_mean_stays(comm: Communicator, graph: str) -> None:
    distances, drift, _ = mixing(comm, graph, 20)
    second = np.linalg.norm(matrix(graph, comm.size, 0) - 1 / comm.size, 2)  # largest but one
    for distance, following in pairwise(distances):
        # One peer at a time may leave a difference as it is, but never makes it larger.
        assert following <= second * distance * (1 + 1e-12) + 1e-14
    assert distances[-1] < 0.05 * distances[0]
    assert abs(drift).max() < 1e-14


@each(("graph", "neighbours"), [("ring", 2), ("exponential", 3), ("one_peer", 1), ("complete", 5)])
def test_a_rank_talks_to_its_neighbours_alone(graph: str, neighbours: int) -> None:
    def rank(comm: Communicator) -> int:
        _, _, trainer = mixing(comm, graph, 1)
        sent = trainer.comm.traffic.bytes
        whole = trainer.model.buffers[0].values.nbytes
        start = whole * (comm.size - 1) / comm.size  # the broadcast of the beginning
        return round((sent - start) / whole)

    assert run_threads(6, rank) == [neighbours] * 6


def test_distances_stay_small_while_training() -> None:
    """With a constant learning rate ranks keep a distance, which falls with the rate."""

    def rank(comm: Communicator, lr: float) -> float:
        exchange = Gossip(comm)
        trainer = trainer_of(exchange, SGD(lr))
        with_all: list[np.ndarray] = []
        exchange.average_parameters = lambda: with_all.append(all_values(comm, trainer))
        trainer.fit(data(), epochs=4, global_batch_size=10)
        values = with_all[-1]
        return float(np.linalg.norm(values - values.mean(axis=0)))

    coarse, fine = (run_threads(5, rank, lr)[0] for lr in (0.2, 0.02))
    assert 0 < fine < 0.2 * coarse


@pytest.mark.threads(3)
def test_pushed_parameters_are_averaged_by_their_weights(comm: Communicator) -> None:
    exchange = GradientPush(comm)
    trainer = trainer_of(exchange, SGD(0.0))
    exchange.start(trainer.model.buckets)
    exchange.weight = comm.rank + 0.5
    trainer.model.buffers[0].values[:] += comm.rank
    expected = np.average(all_values(comm, trainer), axis=0, weights=[0.5, 1.5, 2.5])
    with exchange.averaged():
        np.testing.assert_allclose(trainer.model.buffers[0].values, expected, rtol=1e-12)


def test_alone_a_rank_does_plain_sgd() -> None:
    ours = train(Gossip(Serial()), SGD(0.1, momentum=0.9))
    for name, value in train_serially(SGD(0.1, momentum=0.9)).items():
        np.testing.assert_array_equal(ours[name], value)
