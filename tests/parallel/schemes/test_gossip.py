"""Decentralised averaging does what Lian, Assran and Ying et al. say."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import Gossip
from pydtnn.parallel.schemes.gossip import GRAPHS
from tests.each import each
from tests.parallel.schemes.course import assert_close, simulate, train, trainer_of


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
def test_weights_are_doubly_stochastic_and_every_rank_is_reached(graph, size):
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
def test_one_peer_graphs_of_a_power_of_2_are_an_exact_average_after_a_round(size):
    product = np.eye(size)
    for step in range(size.bit_length() - 1):
        product = matrix("one_peer", size, step) @ product
    np.testing.assert_allclose(product, 1 / size, rtol=1e-15)


@pytest.mark.few(4)
@pytest.mark.threads(1, 2, 3, 4, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("graph", GRAPHS)
def test_it_is_steps_followed_by_averages_with_neighbours(comm, graph):
    def step(number: int, w: np.ndarray, grads, samples: np.ndarray) -> None:
        scale = comm.size / samples.sum()
        w[:] = matrix(graph, comm.size, number) @ (w - 0.2 * grads(scale))

    assert_close(train(Gossip(comm, graph=graph), SGD(0.2)), simulate(comm.size, 3, step))


@each(("graph", "neighbours"), [("ring", 2), ("exponential", 3), ("one_peer", 1), ("complete", 5)])
def test_a_rank_talks_to_its_neighbours_alone(graph, neighbours):
    def rank(comm: Communicator) -> float:
        exchange = Gossip(comm, graph=graph)
        trainer = trainer_of(exchange, SGD(0.0))
        exchange.start(trainer.model.buckets)
        before = comm.traffic.bytes
        exchange.update(trainer.optimizer)
        return (comm.traffic.bytes - before) / trainer.model.buffers[0].values.nbytes

    assert run_threads(6, rank) == [neighbours] * 6
