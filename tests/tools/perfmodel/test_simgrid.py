"""Times of messages are those of SimGrid, on all topologies and for seven patterns.

SimGrid is used for development only: it is found where Debian's python3-simgrid is installed, or
where its packages are extracted.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual import sum_seconds
from tests.tools.perfmodel.patterns import PATTERNS
from tests.tools.perfmodel.simgrid_times import REASON, interpreter, simulate

pytestmark = pytest.mark.skipif(interpreter() is None, reason=REASON)

PLATFORMS = sorted((Path(__file__).parents[3] / "examples" / "platforms").glob("*.yaml"))

SAME = 1e-3
"""Both solve the same problem; ours ends messages half a byte early."""

NBYTES = 1 << 20


CASES = [
    *((name, 64) for name in PATTERNS),
    *(pytest.param(name, 256, marks=pytest.mark.long) for name in ("halo", "incast")),
]


def network(path: Path, ranks: int) -> Network:
    """Return the network of an example, without additions, which SimGrid does not know."""
    found = Platform.load(path).network(ranks)
    return Network(found.hosts, found.routes, found.links, 0.0, found.cards)


@cache
def simgrid(path: Path, pattern: str, ranks: int = 64) -> float:
    """Return the time of a pattern on an example by SimGrid, in s."""
    return simulate(PATTERNS[pattern], NBYTES, network(path, ranks))


@pytest.mark.few(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("pattern", "ranks"), CASES)
@pytest.mark.parametrize("path", PLATFORMS, ids=lambda path: path.stem)
def test_a_pattern_takes_as_long_as_in_simgrid(path, pattern, ranks):
    cluster = Platform.load(path).cluster
    if ranks > cluster.hosts * cluster.ranks_per_host:
        pytest.skip("the platform is smaller")
    found = sum_seconds(PATTERNS[pattern], NBYTES, network(path, ranks))
    assert found == pytest.approx(simgrid(path, pattern, ranks), rel=SAME)
