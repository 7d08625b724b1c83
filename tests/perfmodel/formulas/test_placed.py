from collections.abc import Sequence
from dataclasses import replace

import pytest

from pydtnn.comm.schedules import rounds
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.formulas import Placement, allreduce_terms, phases
from tests.each import each
from tests.perfmodel.formulas.evaluate import links_of, seconds

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


@each("nbytes", [64, 100_000, 1 << 20])
@each("ranks", [2, 3, 4, 7, 8, 16])
def test_one_rank_on_each_host_costs_what_the_replay_does(ranks: int, nbytes: int) -> None:
    for name in FLAT:
        assert compare(name, nbytes, 1, ranks) == pytest.approx(1, abs=0.01), name


@each("ranks", [2, 5, 8])
def test_one_host_costs_what_the_replay_does(ranks: int) -> None:
    for name in FLAT:
        assert compare(name, 1 << 20, ranks, 1) == pytest.approx(1, abs=0.01), name


@each(("per_host", "hosts"), [(2, 2), (4, 2), (2, 4), (4, 4)])
@each("name", ["ring", "hierarchical", "binomial_tree", "direct"])
def test_ranks_that_share_a_card_cost_what_the_replay_does(
    name: str, per_host: int, hosts: int
) -> None:
    for nbytes in (64, 1 << 20):
        assert compare(name, nbytes, per_host, hosts) == pytest.approx(1, abs=0.02)


@each("name", ["recursive_doubling", "halving_doubling"])
@each(("per_host", "hosts"), [(2, 2), (4, 2), (2, 4)])
def test_doubling_between_hosts_shares_the_card(name: str, per_host: int, hosts: int) -> None:
    assert compare(name, 1 << 20, per_host, hosts) == pytest.approx(1, abs=0.01)


@each(("per_host", "hosts"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_a_rank_sends_and_adds_what_it_does_in_the_schedule(per_host: int, hosts: int) -> None:
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


def test_messages_of_a_host_share_its_memory() -> None:
    assert compare("ring", 1 << 20, 4, 1, memory=6e9) == pytest.approx(1, abs=0.02)
    # slower than the card, of which three of four ranks do not send: each round ends with them
    assert compare("ring", 100_000, 4, 2, memory=2e8) == pytest.approx(1, abs=0.02)


@each(("latency", "tolerance"), [(50e-6, 0.03), (50e-3, 0.05)])
@each("name", ["ring", "halving_doubling"])
def test_chunks_of_long_arrays_overlap_as_in_the_replay(
    name: str, latency: float, tolerance: float
) -> None:
    # where latencies dominate, as many chunks are in progress as may be
    found = compare(name, 40 << 20, 1, 4, latency=latency)
    assert found == pytest.approx(1, abs=tolerance)


def test_each_rank_copies_its_own_messages_between_hosts() -> None:
    group, nbytes = Placement(8, 4), 1 << 20
    links = links_of(network([0] * 4 + [1] * 4))
    links = replace(links, add=0.0, overhead=0.0, copy=1e-9)
    for name, sent in (("direct", 2 * (8 - 4) / 8), ("hierarchical", 2 * (2 - 1) / 2 / 4)):
        _, between = phases(allreduce_terms(name, group), nbytes, links, group)
        assert between.work == pytest.approx(sent * nbytes * links.copy), name


def test_groups_that_share_a_card_divide_its_bandwidth() -> None:
    links = links_of(network([0, 1]))
    alone, four = (
        seconds(allreduce_terms("ring", group), 1 << 20, links, group)
        for group in (Placement(4, 1), Placement(4, 1, sharing=4))
    )
    assert four == pytest.approx(4 * alone, rel=0.1)


@each(
    ("axis", "expected"),
    [
        ((8, 1, 4), (8, 4, 1)),
        ((4, 2, 4), (4, 2, 2)),
        ((2, 8, 4), (2, 1, 4)),
        ((1, 1, 4), (1, 1, 4)),
    ],
)
def test_an_axis_of_a_mesh_is_placed_on_hosts(
    axis: tuple[int, int, int], expected: tuple[int, int, int]
) -> None:
    ranks, stride, per_host = axis
    placed = Placement.along(ranks, stride, per_host, ranks * stride)
    if axis != (1, 1, 4):
        assert (placed.ranks, placed.per_host, placed.sharing) == expected
    else:
        assert placed.per_host == 1


def test_schedules_without_a_formula_are_refused() -> None:
    with pytest.raises(ValueError, match="replays"):
        allreduce_terms("torus", Placement(8, 2))
    with pytest.raises(ValueError, match="replays"):
        allreduce_terms("recursive_doubling", Placement(12, 4))
