"""Times of messages are those of SimGrid, on all topologies and for ten patterns.

SimGrid is used for development only: it is found where Debian's python3-simgrid is installed, or
where its packages are extracted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.engine.rows import Replay
from pydtnn.perfmodel.formulas import Placement, allreduce_terms
from pydtnn.perfmodel.messages import MessageCosts, duration
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.topology import Dragonfly, FatTree, Topology, Torus
from pydtnn.perfmodel.virtual import run_virtual
from pydtnn.perfmodel.workload import Workload
from pydtnn.utils import clock
from tests.each import each
from tests.perfmodel.formulas.evaluate import links_of, seconds
from tests.perfmodel.patterns import PATTERNS
from tests.perfmodel.simgrid_times import REASON, Zone, interpreter, simulate
from tests.perfmodel.virtual.costs import UniformCosts

pytestmark = pytest.mark.skipif(interpreter() is None, reason=REASON)

PLATFORMS = sorted((Path(__file__).parents[2] / "examples" / "platforms").glob("*.yaml"))
LARGE = [path for path in PLATFORMS if path.stem != "mixed"]
"""Those of at least 1,024 ranks."""

SAME = 1e-3
"""Both solve the same problem; ours ends messages half a byte early."""

NBYTES = 1 << 20

SLOW = ("ring", "all-to-all")
"""Patterns of many messages, which SimGrid takes seconds for."""


def network(path: Path, ranks: int, nbytes: int = NBYTES) -> Network:
    """Return the network of an example, without additions, which SimGrid does not know."""
    found = Platform.load(path).network(ranks)
    return Network(found.hosts, found.routes, found.links, 0.0, found.cards)


@cache
def simgrid(path: Path, pattern: str, ranks: int = 64) -> float:
    """Return the time of a pattern on an example by SimGrid, in s."""
    return simulate(PATTERNS[pattern], NBYTES, network(path, ranks))


@pytest.mark.few(12)
@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name not in SLOW])
@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_a_pattern_of_64_ranks_takes_as_long_as_in_simgrid(path: Path, pattern: str) -> None:
    found = cost(PATTERNS[pattern], NBYTES, network(path, 64))
    assert found == pytest.approx(simgrid(path, pattern), rel=SAME)


@pytest.mark.long
@pytest.mark.covering(1)
@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_a_long_pattern_takes_as_long_as_in_simgrid(path: Path, pattern: str) -> None:
    found = cost(PATTERNS[pattern], NBYTES, network(path, 64))
    assert found == pytest.approx(simgrid(path, pattern), rel=SAME)


@pytest.mark.long
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [
        *((name, 256) for name in PATTERNS if name not in SLOW),
        *((name, 1024) for name in ("broadcast", "pipeline", "incast", "halo")),
    ],
)
@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_pattern_of_many_ranks_takes_as_long_as_in_simgrid(
    path: Path, pattern: str, ranks: int
) -> None:
    found = cost(PATTERNS[pattern], NBYTES, network(path, ranks))
    assert found == pytest.approx(simgrid(path, pattern, ranks), rel=SAME)


@pytest.mark.few(6)
@pytest.mark.parametrize("pattern", ["Rabenseifner", "hierarchical", "recursive doubling"])
@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_virtual_ranks_and_rows_take_as_long_as_in_simgrid(path: Path, pattern: str) -> None:
    net = network(path, 64)
    algorithm, expected = PATTERNS[pattern], simgrid(path, pattern)

    def program(comm: Any) -> float:
        scheduled, array = Scheduled(comm, algorithm), np.zeros(NBYTES // 4, "float32")
        scheduled.allreduce(array[:64])  # creates the group of its messages
        comm.barrier()
        begin = clock.now()
        scheduled.allreduce(array)
        return clock.now() - begin

    run = run_virtual(program, network=net, costs=UniformCosts())
    assert max(run.results) == pytest.approx(expected, rel=SAME)
    rows = Replay(algorithm, net).ends(np.zeros(64), NBYTES).max()
    # rows start all messages of a round together, and divide links for all of their time
    assert rows == pytest.approx(expected, rel=0.05)


ZONES: list[tuple[Topology, Zone, float]] = [
    (FatTree(down=(4, 4, 4), up=(2, 4)), ("fat_tree", [3, [4, 4, 4], [1, 2, 4], [1, 1, 1]]), 1e10),
    (
        Dragonfly(groups=4, routers=4, per_router=4),
        ("dragonfly", [[4, 1], [1, 1], [4, 1], 4]),
        1e10,
    ),
    (Torus(dimensions=(3, 5, 5)), ("torus", [3, 5, 5]), 1e15),  # hosts have no cards of their own
]


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "pattern", [name for name in PATTERNS if name not in (*SLOW, "hierarchical")]
)
@pytest.mark.parametrize(
    ("topology", "zone", "card"), ZONES, ids=["fat tree", "dragonfly", "torus"]
)
def test_routes_are_those_of_the_topologies_of_simgrid(
    topology: Topology, zone: Zone, card: float, pattern: str
) -> None:
    net = Network.create(
        range(topology.hosts), latency=0.0, bandwidth=1e10, card=card, topology=topology
    )
    expected = simulate(PATTERNS[pattern], NBYTES, net, zone)
    assert cost(PATTERNS[pattern], NBYTES, net) == pytest.approx(expected, rel=SAME)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("ring", marks=pytest.mark.long),
        "Rabenseifner",
        "recursive doubling",
        "hierarchical",
    ],
)
@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_closed_formulas_take_as_long_as_in_simgrid(path: Path, pattern: str) -> None:
    platform = Platform.load(path)
    plain = replace(platform.messages, call=0.0, add=None)  # SimGrid has messages only
    platform = replace(platform, messages=plain)
    work = Workload("cnn", (12, 12, 1), 10, 256, {"data": 64})
    costs = MessageCosts(platform, work)
    name = {"Rabenseifner": "halving_doubling"}.get(pattern, pattern.replace(" ", "_"))
    found = duration(costs.sum(name, NBYTES, "data"))
    assert found == pytest.approx(simgrid(path, pattern), rel=0.05)  # ours: busiest link of a round


LINKS = {"latency": 50e-6, "bandwidth": 1.25e8, "local_latency": 1e-6, "local_bandwidth": 5e9}


@pytest.mark.long
@each("name", ["ring", "hierarchical"])
@each("nbytes", [10_000, 1 << 20])
def test_closed_formulas_of_64_ranks_on_16_hosts_take_as_long_as_in_simgrid(
    name: str, nbytes: int
) -> None:
    net = Network.create(
        [rank // 4 for rank in range(64)], memory=LINKS["local_bandwidth"], **LINKS
    )
    expected = simulate(name, nbytes, net)
    group = Placement(64, 4)
    formula = seconds(allreduce_terms(name, group), nbytes, links_of(net), group)
    assert formula == pytest.approx(expected, rel=0.05)
    assert cost(name, nbytes, net) == pytest.approx(expected, rel=SAME)
