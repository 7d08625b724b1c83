from collections.abc import Sequence
from dataclasses import replace

import pytest

from pydtnn.comm.schedules import rounds
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.network import Network
from pydtnn.tools.perfmodel.formulas import Placement, allreduce_terms, phases
from tests.each import each
from tests.tools.perfmodel.formulas.evaluate import links_of, seconds

FLAT = ("ring", "recursive_doubling", "halving_doubling", "binomial_tree", "direct", "torus")


def network(hosts: Sequence[int], memory: float | None = None, latency: float = 50e-6) -> Network:
    return Network.create(
        hosts,
        latency=latency,
        bandwidth=1.25e8,
        local_latency=1e-6,
        local_bandwidth=5e9,
        memory=memory,
        add=1 / 4e9,
    )


def compare(name: str, nbytes: int, per_host: int, hosts: int, **options: float) -> float:
    """Return the ratio of the formula to the replay of the schedule."""
    net = network([rank // per_host for rank in range(per_host * hosts)], **options)
    group = Placement(per_host * hosts, per_host)
    found = seconds(allreduce_terms(name, group), nbytes, links_of(net), group, chunked=True)
    return found / cost(name, nbytes, net)


@each(
    ("per_host", "hosts"),
    [(1, 2), (1, 3), (1, 7), (1, 16), (2, 1), (5, 1), (2, 2), (4, 2), (2, 4), (4, 4)],
)
@each("nbytes", [64, 1 << 20])
def test_a_sum_costs_what_the_replay_does(per_host, hosts, nbytes):
    alone = 1 in (per_host, hosts)
    for name in FLAT if alone else ("hierarchical", *FLAT[:-1]):
        if alone or nbytes > 64 or "doubling" not in name:  # whose short messages overlap
            found = compare(name, nbytes, per_host, hosts)
            assert found == pytest.approx(1, abs=0.01 if alone else 0.02), name


@each(("per_host", "hosts"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_a_rank_sends_and_adds_what_it_does_in_the_schedule(per_host, hosts):
    places = [rank // per_host for rank in range(per_host * hosts)]
    for name in ("hierarchical", *FLAT[:-1]):
        local, between, *_ = allreduce_terms(name, Placement(len(places), per_host))
        steps = [[s for r in rounds(name, rank, places) for s in r] for rank in range(len(places))]
        received = [[s.receive for s in own if s.receive and s.op == "sum"] for own in steps]
        added = max(float(sum(part.stop - part.start for part in own)) for own in received)
        assert local.added + between.added == pytest.approx(added), name
        messages = max(sum(s.send is not None for s in own) for own in steps)
        if name != "binomial_tree":  # whose are those that follow one another, up and down
            assert local.messages + between.messages == messages, name


def test_messages_of_a_host_share_its_memory():
    assert compare("ring", 1 << 20, 4, 1, memory=6e9) == pytest.approx(1, abs=0.02)
    # slower than the card, of which three of four ranks do not send: each round ends with them
    assert compare("ring", 100_000, 4, 2, memory=2e8) == pytest.approx(1, abs=0.02)


@each(("latency", "tolerance"), [(50e-6, 0.03), (50e-3, 0.05)])
@each("name", ["ring", "halving_doubling"])
def test_chunks_of_long_arrays_overlap_as_in_the_replay(name, latency, tolerance):
    # where latencies dominate, as many chunks are in progress as may be
    found = compare(name, 40 << 20, 1, 4, latency=latency)
    assert found == pytest.approx(1, abs=tolerance)


def test_each_rank_copies_its_own_messages_between_hosts():
    group, nbytes = Placement(8, 4), 1 << 20
    links = links_of(network([0] * 4 + [1] * 4))
    links = replace(links, add=0.0, overhead=0.0, copy=1e-9)
    for name, sent in (("direct", 2 * (8 - 4) / 8), ("hierarchical", 2 * (2 - 1) / 2 / 4)):
        _, between = phases(allreduce_terms(name, group), nbytes, links, group)
        assert between.work == pytest.approx(sent * nbytes * links.copy), name


@each(
    ("axis", "expected"),
    [
        ((8, 1, 4), (8, 4, 1)),
        ((4, 2, 4), (4, 2, 2)),
        ((2, 8, 4), (2, 1, 4)),
        ((1, 1, 4), (1, 1, 1)),
    ],
)
def test_an_axis_of_a_mesh_is_placed_on_hosts_whose_cards_it_shares(axis, expected):
    ranks, stride, per_host = axis
    placed = Placement.along(ranks, stride, per_host, ranks * stride)
    assert (placed.ranks, placed.per_host, placed.sharing) == expected


def test_groups_that_share_a_card_divide_its_bandwidth():
    """Six messages of a quarter of 1 MB, of which three are added."""
    links = links_of(network([0, 1]))
    for groups in (1, 4):
        group = Placement(4, 1, sharing=groups)
        found = seconds(allreduce_terms("ring", group), 10**6, links, group)
        assert found == pytest.approx(6 * (50e-6 + groups * 2e-3) + 3 * 62.5e-6)


@each(("name", "group"), [("torus", Placement(8, 2)), ("recursive_doubling", Placement(12, 4))])
def test_schedules_without_a_formula_are_refused(name, group):
    with pytest.raises(ValueError, match="replays"):
        allreduce_terms(name, group)
