"""Schedules of many ranks, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.engine.rows import MAX_ROUND_BY_ROUND, Replay
from tests.each import each


def network(hosts: list[int], add: float = 1e-10) -> Network:
    return Network.create(
        hosts, latency=1e-4, bandwidth=1.25e8, local_latency=1e-6, local_bandwidth=1e10, add=add
    )


@each("hosts", [[0, 0], [0, 1, 2], [0, 0, 1, 1], [*range(8)]])
@each("algorithm", SCHEDULES)
def test_ranks_that_start_together_take_the_time_of_the_simulation(algorithm, hosts):
    ends = Replay(algorithm, network(hosts)).ends(np.zeros(len(hosts)), 1_000_000)
    assert ends.max() == pytest.approx(cost(algorithm, 1_000_000, network(hosts)), rel=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "algorithm",
    ["ring", pytest.param("bidirectional_ring", marks=pytest.mark.long), "hierarchical"],
)
def test_turned_rounds_are_those_of_all_ranks(algorithm, monkeypatch):
    hosts = [*range(MAX_ROUND_BY_ROUND + 6)]
    turned = Replay(algorithm, network(hosts)).ends(np.zeros(len(hosts)), 1_000_000)
    monkeypatch.setattr("pydtnn.perfmodel.engine.rows.MAX_ROUND_BY_ROUND", 1000)
    every = Replay(algorithm, network(hosts)).ends(np.zeros(len(hosts)), 1_000_000)
    assert turned == pytest.approx(every)


def test_a_late_rank_delays_its_successors_in_a_ring():
    starts = np.array([0.0, 0.0, 1.0, 0.0])
    ends = Replay("ring", network([0, 1, 2, 3])).ends(starts, 1_000_000)
    assert ends.min() > 1.0
    assert ends.max() < 1.0 + 2 * cost("ring", 1_000_000, network([0, 1, 2, 3]))


def test_calls_take_time_of_the_processor():
    replay = Replay("ring", network([0, 1, 2, 3]))
    assert replay.calls.tolist() == [12] * 4
    without, with_calls = (replay.ends(np.zeros(4), 8, call).max() for call in (0.0, 1e-3))
    assert with_calls == pytest.approx(without + 12e-3)


def test_the_busy_time_has_no_latencies():
    replay = Replay("ring", network([0, 1, 2, 3], add=0.0))
    assert replay.busy(1_000_000) == pytest.approx(6 * 250_000 / 1.25e8)
