"""Rounds of schedules and other patterns on the links of a platform."""

import pytest

from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.executor import pieces
from pydtnn.tools.perfmodel import patterns
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.patterns import AxisGroups, Processing, Wires, library_terms, rows_of
from pydtnn.tools.perfmodel.platform import Link
from pydtnn.tools.perfmodel.virtual import sum_seconds
from tests.each import each

INSIDE, BETWEEN = Link(1e-6, 5e9), Link(50e-6, 1.25e8)
WIRES = Wires(INSIDE, BETWEEN, None, 1)
ADD = Processing(add=1 / 4e9)


def seconds(name: str, nbytes: int, groups: AxisGroups, wires: Wires = WIRES) -> float:
    apart = (1.0, pieces(nbytes)) if groups.hosts > 1 else (pieces(nbytes), 1)
    return sum(ADD.round(row, nbytes, *apart).seconds for row in rows_of(name, groups, wires))


@each("name", SCHEDULES, few=20)
@each(("ranks", "per_host"), [(2, 1), (7, 1), (5, 5), (4, 2), (6, 4), (7, 3), (16, 4)])
@pytest.mark.parametrize("nbytes", [64, 1 << 20, pytest.param(20 << 20, marks=pytest.mark.long)])
def test_a_sum_takes_as_long_as_on_virtual_ranks(name, ranks, per_host, nbytes):
    network = Network.create(
        [rank // per_host for rank in range(ranks)],
        latency=BETWEEN.latency,
        bandwidth=BETWEEN.bandwidth,
        local_latency=INSIDE.latency,
        local_bandwidth=INSIDE.bandwidth,
        add=ADD.add,
    )
    expected = sum_seconds(name, nbytes, network)
    found = seconds(name, nbytes, AxisGroups(ranks, 1, per_host, ranks))
    deep, long = "doubling" in name or "tree" in name, nbytes > 1 << 20
    # some ranks of a row wait for messages between hosts, or for earlier chunks, and others do not
    room = 0.5 if deep and (per_host == 3 or long) else 0.05 if long else 0.01
    assert found == pytest.approx(expected, rel=room), name


@each(
    ("axis", "hosts", "groups"),
    [((8, 1, 4), 2, 1), ((4, 2, 4), 2, 2), ((2, 8, 4), 2, 8), ((1, 1, 4), 1, 1)],
)
def test_an_axis_of_a_mesh_is_placed_on_hosts_whose_cards_it_shares(axis, hosts, groups):
    ranks, stride, per_host = axis
    found = AxisGroups(ranks, stride, per_host, ranks * stride)
    assert (found.hosts, len(found.members)) == (hosts, groups)
    if hosts > 1:
        (alone,), (shared,) = (
            rows_of("to_next", one, WIRES) for one in (found._replace(stage=(0, 1, stride)), found)
        )
        assert shared.shared == min(groups, per_host) * alone.shared


def test_groups_on_the_most_hosts_determine_the_time():
    groups = AxisGroups(3, 1, 4, 12)
    assert groups.members.tolist() == [[3, 4, 5], [6, 7, 8]]
    (row,) = rows_of("to_all", groups, WIRES)
    assert row.shared == pytest.approx(4 / 3 / BETWEEN.bandwidth)  # of both, from their host


def test_each_rank_copies_the_messages_to_and_from_other_hosts():
    for name, sent in (("direct", 2 * (8 - 4) / 8), ("hierarchical", 2 * (2 - 1) / 2 / 4)):
        rows = rows_of(name, AxisGroups(8, 1, 4, 8), WIRES)
        assert sum(row.copied for row in rows) == pytest.approx(2 * sent), name


def test_messages_of_a_host_share_its_memory():
    slow = WIRES._replace(inside=Link(1e-6, 5e9, 6e9))
    found, usual = (seconds("ring", 1 << 20, AxisGroups(4, 1, 4, 4), own) for own in (slow, WIRES))
    assert found == pytest.approx(usual + 6 * 2**18 * (4 / 6e9 - 1 / 5e9))


def test_rounds_of_many_ranks_are_merged_and_take_as_long():
    given = "ring", AxisGroups(100, 1, 1, 100), WIRES
    rounds = patterns.rounds_of(*given, ADD, 1e6)
    assert len(rounds) <= patterns.MAX_ROUNDS
    expected = sum(ADD.round(row, 1e6).seconds for row in rows_of(*given))
    assert sum(one.seconds for one in rounds) == pytest.approx(expected)


def test_a_library_has_latencies_of_a_tree_and_the_least_bytes():
    assert library_terms("allreduce", 8) == (3, 2 * 7 / 8)
    assert library_terms("barrier", 5) == (3, 0.0)
    assert library_terms("allreduce", 1) == (0, 0.0)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("ranks", "stride", "per_host"), [(16, 1, 4), (8, 2, 4), (12, 3, 1), (16, 5, 8)]
)
def test_messages_to_many_ranks_take_as_long_by_a_formula(
    ranks, stride, per_host, alone, monkeypatch
):
    stage = (1, ranks * stride, 2) if alone else ()
    groups = AxisGroups(ranks, stride, per_host, 2 * ranks * stride, stage)
    wires = WIRES._replace(inside=Link(1e-6, 5e9, 9e9), rails=2)
    (listed,) = rows_of.__wrapped__("to_all", groups, wires)
    monkeypatch.setattr(patterns, "MANY_RANKS", 1)
    (found,) = rows_of.__wrapped__("to_all", groups, wires)
    assert found == pytest.approx(listed, rel=1e-12)
