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
from pydtnn.perfmodel.messages import MessageCosts, duration
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.virtual import run_virtual
from pydtnn.perfmodel.workload import Workload
from pydtnn.utils import clock
from tests.perfmodel.patterns import PATTERNS
from tests.perfmodel.simgrid_times import REASON, interpreter, simulate
from tests.perfmodel.virtual.costs import UniformCosts

pytestmark = pytest.mark.skipif(interpreter() is None, reason=REASON)

PLATFORMS = sorted((Path(__file__).parents[2] / "examples" / "platforms").glob("*.yaml"))

SAME = 1e-3
"""Both solve the same problem; ours ends messages half a byte early."""

NBYTES = 1 << 20


CASES = [
    *((name, 64) for name in PATTERNS),
    *(pytest.param(name, 1024, marks=pytest.mark.long) for name in ("broadcast", "halo")),
]


def network(path: Path, ranks: int) -> Network:
    """Return the network of an example, without additions, which SimGrid does not know."""
    found = Platform.load(path).network(ranks)
    return Network(found.hosts, found.routes, found.links, 0.0, found.cards)


@cache
def simgrid(path: Path, pattern: str, ranks: int = 64) -> float:
    """Return the time of a pattern on an example by SimGrid, in s."""
    return simulate(PATTERNS[pattern], NBYTES, network(path, ranks))


@pytest.mark.few(12)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("pattern", "ranks"), CASES)
@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_a_pattern_takes_as_long_as_in_simgrid(path: Path, pattern: str, ranks: int) -> None:
    cluster = Platform.load(path).cluster
    if ranks > cluster.hosts * cluster.ranks_per_host:
        pytest.skip("the platform is smaller")
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


@pytest.mark.parametrize("pattern", ["Rabenseifner", "recursive doubling", "hierarchical"])
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
