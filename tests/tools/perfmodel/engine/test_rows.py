"""Schedules of many ranks, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm.schedules import SCHEDULES
from pydtnn.tools.perfmodel.engine.rows import MAX_ROUND_BY_ROUND, RowTimes
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual import sum_seconds
from tests.each import each


def network(hosts: list[int], add: float = 1e-10) -> Network:
    return Network.create(
        hosts, latency=1e-4, bandwidth=1.25e8, local_latency=1e-6, local_bandwidth=1e10, add=add
    )


@each("hosts", [[0, 0], [0, 1, 2], [0, 0, 1, 1], [*range(8)]])
@each("algorithm", SCHEDULES)
def test_ranks_that_start_together_take_the_time_of_the_simulation(algorithm, hosts):
    ends = RowTimes(algorithm, network(hosts)).ends(np.zeros(len(hosts)), 1_000_000)
    assert ends.max() == pytest.approx(sum_seconds(algorithm, 1_000_000, network(hosts)), rel=1e-5)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_turned_rounds_are_those_of_all_ranks(algorithm, monkeypatch):
    hosts = [*range(MAX_ROUND_BY_ROUND + 6)]
    turned = RowTimes(algorithm, network(hosts)).ends(np.zeros(len(hosts)), 1_000_000)
    monkeypatch.setattr("pydtnn.tools.perfmodel.engine.rows.MAX_ROUND_BY_ROUND", 1000)
    every = RowTimes(algorithm, network(hosts)).ends(np.zeros(len(hosts)), 1_000_000)
    assert turned == pytest.approx(every)


def test_late_ranks_calls_and_additions_delay_a_ring():
    """Six messages of a quarter: each takes 0.1 ms and 2 ms, and three are added in 25 us."""
    replay = RowTimes("ring", network([0, 1, 2, 3]))
    whole = 6 * 2.1e-3 + 3 * 25e-6
    assert replay.ends(np.zeros(4), 1_000_000) == pytest.approx([whole] * 4)
    assert replay.busy(1_000_000) == pytest.approx(6 * 2e-3)
    assert replay.calls.tolist() == [12] * 4
    with_calls = replay.ends(np.zeros(4), 1_000_000, 1e-3)
    assert with_calls == pytest.approx([whole + 12e-3] * 4)
    late = replay.ends(np.array([0.0, 0.0, 1.0, 0.0]), 1_000_000)
    assert late.max() == pytest.approx(1 + whole)
