"""Messages of schedules, in rows that start together."""

from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS.keys())
def test_a_formula_has_the_messages_of_all_ranks_of_a_schedule(hosts, monkeypatch):
    both = []
    for formulas in (rows.FORMULAS, {}):
        monkeypatch.setattr(rows, "FORMULAS", formulas)
        messages_by_row.cache_clear()
        both.append(messages_by_row("hierarchical", hosts))
    messages_by_row.cache_clear()
    for own, other in zip(*both, strict=True):
        first, second = (np.array(sorted(zip(*row, strict=True))) for row in (own, other))
        assert first == pytest.approx(second)


@pytest.mark.parametrize(
    ("pattern", "share", "rounds"),
    [
        ("neighbours", 1.0, [{(0, 1), (1, 0), (1, 2), (2, 1)}]),
        ("to_next", 1.0, [{(0, 1), (1, 2)}]),
        ("to_all", 1 / 3, [{(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}]),
        ("around", 1.0, [{(0, 1), (1, 2), (2, 0)}, {(0, 2), (1, 0), (2, 1)}]),
    ],
)
def test_other_patterns_have_these_messages_of_three_ranks(pattern, share, rounds):
    found = messages_by_row(pattern, (0, 1, 2))
    assert [{*zip(*map(list, row[:2]), strict=True)} for row in found] == rounds
    assert all({*row.shares} == {share} and not row.adds.any() for row in found)
    assert messages_by_row(pattern, (0,)) == ()
