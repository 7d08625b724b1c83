"""Topologies: routes, and what platforms do with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pydtnn.comm.schedules.steps import ALL, Group, Rounds, receive, send
from pydtnn.tools.perfmodel.messages import MessageCosts, duration
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.patterns import AxisGroups, Wires, rows_of
from pydtnn.tools.perfmodel.platform import Platform, Slower
from pydtnn.tools.perfmodel.topology import Dragonfly, FatTree, Topology, Torus
from pydtnn.tools.perfmodel.virtual import sum_seconds
from pydtnn.tools.perfmodel.virtual.disturbances import NONE
from pydtnn.tools.perfmodel.virtual.steps import predict
from pydtnn.training.workload import Workload
from tests.each import each

EXAMPLES = Path(__file__).parents[3] / "examples" / "platforms"

TOPOLOGIES: list[Topology] = [
    FatTree(down=(4, 3), up=(2,)),
    FatTree(down=(2, 3, 4), up=(2, 3)),
    Dragonfly(groups=5, routers=3, per_router=2),
    Torus(dimensions=(4, 3, 2)),
]


@each("topology", TOPOLOGIES)
def test_a_path_leads_from_the_switch_of_the_source_to_that_of_the_target(topology):
    ends: dict[int, set[tuple[int, ...]]] = {host: set() for host in range(topology.hosts)}
    for source in range(topology.hosts):
        for target in range(topology.hosts):
            if source != target:
                path = topology.path(source, target)
                ends[source].add(path[0])
                ends[target].add(path[-1])
                assert all(here != there for here, there in pairwise(path))
                assert len(path) == len(topology.path(target, source))
    assert all(len(switches) == 1 for switches in ends.values())


@each(
    ("topology", "source", "target", "path"),
    [
        (Dragonfly(groups=5, routers=3, per_router=2), 0, 1, [(0, 0)]),
        (Dragonfly(groups=5, routers=3, per_router=2), 0, 5, [(0, 0), (0, 2)]),
        # group 0 reaches group 4 from its router 4 % 3, which enters at router 0 % 3
        (Dragonfly(groups=5, routers=3, per_router=2), 0, 28, [(0, 0), (0, 1), (4, 0), (4, 2)]),
        (Torus(dimensions=(5, 3)), 0, 4, [(0, 0), (4, 0)]),  # the shorter direction
        (Torus(dimensions=(5, 3)), 0, 7, [(0, 0), (1, 0), (2, 0), (2, 1)]),
        (Torus(dimensions=(5, 3)), 4, 11, [(4, 0), (0, 0), (1, 0), (1, 2)]),
    ],
)
def test_a_message_takes_the_shortest_path(topology, source, target, path):
    assert topology.path(source, target) == path


def test_a_fat_tree_ascends_to_the_nearest_common_level_without_sharing_links():
    """Shifts share none if it is not oversubscribed, for which its routing is known."""
    tree = FatTree(down=(2, 3, 4), up=(2, 3))
    assert [len(tree.path(0, target)) for target in (1, 2, 5, 6, 23)] == [1, 3, 3, 5, 5]
    tree = FatTree(down=(4, 4), up=(4,))
    for by in range(1, 16):
        used = Counter(
            link for host in range(16) for link in pairwise(tree.path(host, (host + by) % 16))
        )
        assert max(used.values(), default=1) == 1


def network(topology: Topology, **numbers: float) -> Network:
    return Network.create(
        range(topology.hosts), latency=1e-6, bandwidth=1e9, topology=topology, **numbers
    )


def across(group: Group) -> Rounds:
    """All ranks of the first half send to the second half."""
    half = group.size // 2
    if group.rank < half:
        yield (send(group.rank + half, ALL),)
    else:
        yield (receive(group.rank - half, ALL),)


@each(
    ("topology", "seconds"),
    [
        (FatTree(down=(8, 2), up=(8,)), 0.01),
        (FatTree(down=(8, 2), up=(2,)), 0.04),  # oversubscribed
        (FatTree(down=(16,), switch=4e9), 0.02),  # all share a slow switch
        (Dragonfly(groups=2, routers=2, per_router=2), 0.04),  # one link between groups
    ],
)
def test_links_of_a_topology_are_shared_and_have_latencies(topology, seconds):
    assert sum_seconds(across, 10**7, network(topology)) == pytest.approx(1e-6 + seconds, rel=1e-3)
    slow = network(replace(topology, hop=1e-3))
    links = [len(topology.path(0, host)) - 1 for host in (1, topology.hosts - 1)]
    latencies = [slow.route(0, host).latency for host in (1, topology.hosts - 1)]
    assert latencies == pytest.approx([1e-6 + 1e-3 * each for each in links])


def test_rails_are_networks_of_their_own():
    platform = Platform.load(EXAMPLES / "rails.yaml")
    net = platform.network(8)
    assert {*net.route(0, 4).links}.isdisjoint(net.route(1, 5).links)
    assert net.route(0, 5) == net.route(0, 4)  # the sender determines the rail
    assert net.route(0, 1).links == ()
    single = replace(platform, messages=replace(platform.messages, rails=1)).network(16)
    assert sum_seconds(across, 10**7, platform.network(16)) < 0.3 * sum_seconds(
        across, 10**7, single
    )


@each("path", sorted(EXAMPLES.glob("*.yaml")), few=2)
def test_closed_formulas_and_virtual_ranks_agree_on_a_topology(path):
    ranks = 64
    platform = Platform.load(path)
    platform = replace(platform, messages=replace(platform.messages, call=0.0, add=None))
    costs = MessageCosts(platform, Workload("cnn", (12, 12, 1), 10, 4 * ranks, {"data": ranks}))
    expected = sum_seconds("hierarchical", 1 << 20, platform.network(ranks))
    found = duration(costs.sum("hierarchical", 1 << 20, "data"))
    assert found == pytest.approx(expected, rel=0.02)


def test_messages_to_all_others_meet_at_the_links_between_switches():
    """Both ranks below a switch send two quarters across it; a card has three quarters."""
    platform = Platform.load("cpu-10gbit")
    tree = FatTree(down=(2, 2), up=(1,), hop=platform.messages.between.latency)
    platform = replace(platform, topology=tree, cluster=replace(platform.cluster, hosts=4))
    (row,) = rows_of("to_all", AxisGroups(4, 1, 1, 4), Wires.of(platform, 4))
    between = platform.messages.between
    assert row.latency == pytest.approx(3 * between.latency)
    assert row.shared == pytest.approx(1 / between.bandwidth)


def test_slower_ranks_delay_a_step_in_both_predictors():
    mixed = Platform.load(EXAMPLES / "mixed.yaml")
    assert (mixed.slowdown(48), mixed.slowdown(64)) == (1.0, 1.6)
    work = Workload("cnn", (12, 12, 1), 10, 8, {"data": 2})
    slow, usual = (
        predict(work, replace(mixed, compute=replace(mixed.compute, slower=slower))).seconds
        for slower in ((Slower(1, 1, 1.6),), ())
    )
    assert slow > usual
    assert NONE.on(mixed, 50).stragglers[-1].rank == 49
    assert NONE.on(mixed, 48) is NONE


def test_hosts_that_a_topology_does_not_have_are_refused_and_others_noted():
    with pytest.raises(ValueError, match="torus has 256 hosts, 2048 ranks need 512; use fewer"):
        Platform.load(EXAMPLES / "torus.yaml").network(2048)
    plain = Platform.load("cpu-10gbit")
    assert plain.check_hosts(32) == ""
    assert plain.check_hosts(4096).startswith("cpu-10gbit has 32 hosts, 4096 ranks need 4096: ")
    assert plain.network(64).route(0, 63).bandwidth == 1.25e9


BASE = "base: cpu-10gbit\nname: x\n"


@each(
    ("text", "message"),
    [
        ("topology: {fat_tree: {down: [4, 8], up: [2, 2]}}", "x.yaml: topology.fat_tree.up: expec"),
        ("topology: {fat_tree: {down: 4}}", "topology.fat_tree.down: expected a list, got 4"),
        ("topology: {fat_tre: {down: [4]}}", "topology: unknown entry 'fat_tre'"),
        ("topology: torus", "topology: expected one of the entries fat_tree, dragonfly, torus"),
        ("topology: {torus: {dimensions: [2, 3]}}", "cluster.hosts: expected at most the 6 hosts"),
        ("messages: {rails: 0}", "messages.rails must be at least 1, got 0"),
        ("compute: {slower: [{first: 1, last: 2}]}", r"'compute.slower\[0\].factor', got none"),
    ],
)
def test_an_error_in_a_topology_is_one_sentence_with_the_entry(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(f"base: cpu-10gbit\nname: x\n{text}\n")
    with pytest.raises(ValueError, match=message):
        Platform.load(path)


def test_a_base_is_a_platform_or_a_file_beside_it(tmp_path):
    (tmp_path / "one.yaml").write_text("base: cpu-10gbit\nname: one\ncluster: {hosts: 2}\n")
    (tmp_path / "two.yaml").write_text("base: one.yaml\nname: two\nmessages: {add: 5 GB/s}\n")
    two, original = Platform.load(tmp_path / "two.yaml"), Platform.load("cpu-10gbit")
    assert (two.name, two.cluster.hosts, two.messages.add) == ("two", 2, 5e9)
    assert two.compute == original.compute
    (tmp_path / "one.yaml").write_text("base: two.yaml\nname: one\n")
    with pytest.raises(ValueError, match="expected a base that is not based on it"):
        Platform.load(tmp_path / "two.yaml")


def test_the_examples_of_the_documentation_are_those_of_the_files():
    page = (EXAMPLES.parents[1] / "docs" / "platforms.md").read_text()
    blocks = [one for one in page.split("```") if one.startswith("yaml\nbase:")]
    files = {path.read_text().partition("\n")[2].strip() for path in EXAMPLES.glob("*.yaml")}
    assert {block.removeprefix("yaml\n").strip() for block in blocks} == files
