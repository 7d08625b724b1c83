"""Repeated measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydtnn.tools.perfmodel.calibration.sample import Sample, noisy, sample


def test_the_first_call_is_not_counted():
    calls: list[int] = []
    now = iter(range(100))
    found = sample("x", lambda: calls.append(1), repeats=3, clock=lambda: float(next(now)))
    assert len(calls) == 4
    assert found.times == (1.0, 1.0, 1.0)
    assert len(found.elapsed) == 3


def test_ranks_start_together():
    order: list[str] = []
    sample("x", lambda: order.append("work"), repeats=2, together=lambda: order.append("wait"))
    assert order == ["work", "wait", "work", "wait", "work"]


def test_the_spread_is_that_of_wall_times():
    found = Sample("product", (1.0, 1.0, 1.0), (1.0, 2.0, 3.0))
    assert found.shortest == 1.0
    assert found.spread == pytest.approx(1.0)
    assert noisy([found, Sample("quiet", (1.0, 1.05))]) == ["product by 100 %"]
    assert noisy([replace(found, limit=2.0)]) == []


def test_the_rank_with_the_largest_spread_counts():
    ranks = [Sample("copy", (1.0, 1.5, 1.5)), Sample("copy", (1.0, 3.0, 3.0))]
    assert noisy(ranks) == ["copy by 200 %"]
