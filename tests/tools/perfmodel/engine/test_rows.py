"""Messages of schedules, in rows that start together."""

from __future__ import annotations

import numpy as np
import pytest

import pydtnn.tools.perfmodel.patterns  # noqa: F401, adds formulas
from pydtnn.tools.perfmodel.engine import rows
from pydtnn.tools.perfmodel.engine.rows import messages_by_row

HOSTS = {
    "one rank": (*range(6),),
    "one rank, 8 hosts": (*range(8),),
    "two ranks": tuple(k // 2 for k in range(12)),
    "one or two ranks": tuple(5 * k // 8 for k in range(18)),
    "one or two ranks, 8 hosts": tuple(5 * k // 8 for k in range(12)),
    "three or four ranks": (0, 0, 0, 1, 1, 1, 1, 2, 2, 2),
}


@pytest.mark.parametrize("algorithm", rows.FORMULAS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS.keys())
def test_formulas_have_the_messages_of_all_ranks(algorithm, hosts, monkeypatch):
    both = []
    for formulas in (rows.FORMULAS, {}):
        monkeypatch.setattr(rows, "FORMULAS", formulas)
        messages_by_row.cache_clear()
        both.append(messages_by_row(algorithm, hosts))
    messages_by_row.cache_clear()
    for own, other in zip(*both, strict=True):
        first, second = (np.array(sorted(zip(*row, strict=True))) for row in (own, other))
        assert first == pytest.approx(second)
