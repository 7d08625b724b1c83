"""`check_plan` accepts plans that compute what serial training does, and names the layer if not."""

from __future__ import annotations

import pytest

from pydtnn.layers import BatchNorm, Conv2d, Flatten, Layer, Linear, ReLU
from pydtnn.testing import check_plan


def layers() -> list[Layer]:
    return [
        Conv2d(4, 3, padding=1, name="first"),
        BatchNorm(name="norm"),
        ReLU(),
        Conv2d(4, 3, stride=2, padding=1, name="second"),
        ReLU(),
        Flatten(),
        Linear(3, name="last"),
    ]


def test_the_report_is_a_table() -> None:
    report = check_plan(layers(), (5, 7, 2), "filter", meshes=[{"filter": 2}])
    (row,) = report.rows
    assert max(row.differences.values()) < 1e-13
    title, head, line = str(report).splitlines()
    assert title.startswith("filter: 379 parameters, 3 steps of 5 samples")
    assert len(head) == len(line)


def test_default_meshes_that_are_not_possible_are_left_out() -> None:
    net = [Conv2d(2, 1), Flatten(), Linear(2)]
    report = check_plan(net, (2, 3, 2), {"*": {"filter": "model"}})
    assert [row.mesh for row in report.rows if not row.refused] == [
        {"model": 2},
        {"data": 2, "model": 2},
    ]
    assert "at least the 3 ranks, got 2" in str(report)
    with pytest.raises(ValueError, match="filters must be at least the 3 ranks, got 2"):
        check_plan(net, (2, 3, 2), {"*": {"filter": "model"}}, meshes=[{"model": 3}])
