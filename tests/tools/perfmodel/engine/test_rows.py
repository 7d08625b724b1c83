"""Messages of schedules, in rows that start together."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.tools.perfmodel.engine.rows import MAX_ROUND_BY_ROUND, messages_by_row


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_turned_rounds_are_those_of_all_ranks(algorithm, monkeypatch):
    hosts = (*range(MAX_ROUND_BY_ROUND + 6),)
    turned = messages_by_row(algorithm, hosts)
    monkeypatch.setattr("pydtnn.tools.perfmodel.engine.rows.MAX_ROUND_BY_ROUND", 1000)
    messages_by_row.cache_clear()
    every = messages_by_row(algorithm, hosts)
    for own, other in zip(turned, every, strict=True):
        first, second = (np.array(sorted(zip(*row, strict=True))) for row in (own, other))
        assert first == pytest.approx(second)
