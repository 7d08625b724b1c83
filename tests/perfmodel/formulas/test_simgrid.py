"""Comparison with SimGrid: needs Debian's python3-simgrid, for development only."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pydtnn.comm.schedules import rounds
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.formulas import Links, Placement, allreduce_terms, seconds

PYTHON = "/usr/bin/python3"  # of the system, for which Debian's packages are installed

REPLAY = Path(__file__).parent.parent / "simgrid_replay.py"

OPTIONS = [  # latencies and bandwidths as they are given
    "--cfg=network/model:CM02",
    "--cfg=network/crosstraffic:0",
    "--cfg=network/TCP-gamma:0",
    "--log=root.thresh:error",
]

LINKS = {"latency": 50e-6, "bandwidth": 1.25e8, "local_latency": 1e-6, "local_bandwidth": 5e9}


def has_simgrid() -> bool:
    try:
        done = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, timeout=60)
    except OSError:
        return False
    return done.returncode == 0


def simulate(name: str, hosts: list[int], nbytes: int) -> float:
    """Return the time of an allreduce of one chunk, in s."""

    def plan(rank: int) -> list[dict[str, Any]]:
        return [
            {
                "send": [
                    (s.peer, nbytes * float(s.send.stop - s.send.start)) for s in steps if s.send
                ],
                "receive": [s.peer for s in steps if s.receive],
            }
            for steps in rounds(name, rank, hosts)
        ]

    case = {
        "hosts": hosts,
        "rounds": [plan(rank) for rank in range(len(hosts))],
        "options": OPTIONS,
        **LINKS,
    }
    done = subprocess.run(
        [PYTHON, str(REPLAY)], input=json.dumps(case), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", ["ring", "hierarchical"])
@pytest.mark.parametrize("nbytes", [10_000, 1 << 20])
def test_64_ranks_on_16_hosts_take_as_long_as_in_simgrid(name: str, nbytes: int) -> None:
    if not has_simgrid():
        pytest.skip("requires python3-simgrid")
    hosts = [rank // 4 for rank in range(64)]
    network = Network.create(hosts, memory=LINKS["local_bandwidth"], **LINKS)
    expected = simulate(name, hosts, nbytes)
    group = Placement(64, 4)
    formula = seconds(allreduce_terms(name, group), nbytes, Links.of(network), group)
    assert formula == pytest.approx(expected, rel=0.1)
    assert cost(name, nbytes, network) == pytest.approx(expected, rel=0.1)
