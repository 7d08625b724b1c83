"""SimGrid as a reference for the times of messages: where it is found, and how it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.tools.perfmodel.network import Network

ROOT = Path(__file__).parents[3]

EXTRACTED = Path(os.environ.get("PYDTNN_SIMGRID", ROOT / "build" / "simgrid"))
"""Where Debian's packages are extracted, if they are not installed (`.ci/simgrid`)."""

REPLAY = Path(__file__).with_name("simgrid_replay.py")

REASON = "requires SimGrid: apt-get install python3-simgrid, or .ci/simgrid"


@cache
def interpreter() -> tuple[str, dict[str, str]] | None:
    """Return a Python that imports simgrid, with its environment; None if there is none."""
    libraries = ":".join(map(str, EXTRACTED.glob("usr/lib/*-linux-gnu")))
    modules = EXTRACTED / "usr/lib/python3/dist-packages"
    extracted = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(modules)}
    for python in ("/usr/bin/python3", sys.executable):
        for further in ({}, extracted):
            environment = {"PATH": os.environ.get("PATH", ""), **further}
            try:
                done = subprocess.run(
                    [python, "-c", "import simgrid"],
                    env=environment,
                    capture_output=True,
                    timeout=60,
                )
            except OSError:
                continue
            if done.returncode == 0:
                return python, environment
    return None


def simulate(algorithm: Algorithm | str, nbytes: int, network: Network) -> float:
    """Return the time of a schedule on a network by SimGrid, in s."""
    plan = [
        [
            (
                [(s.peer, nbytes * float(s.send.stop - s.send.start)) for s in steps if s.send],
                [s.peer for s in steps if s.receive],
            )
            for steps in rounds(algorithm, rank, network.hosts)
        ]
        for rank in range(len(network.hosts))
    ]
    pairs = {
        (rank, peer): None for rank, own in enumerate(plan) for sends, _ in own for peer, _ in sends
    }
    routes = [(*pair, *network.route(*pair)) for pair in pairs]
    used = {link for *_, links in routes for link in links}
    case = {"rounds": plan, "routes": routes, "links": {link: network.links[link] for link in used}}
    found = interpreter()
    assert found is not None
    python, environment = found
    done = subprocess.run(
        [python, str(REPLAY)],
        input=json.dumps(case),
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout.split()[-1])
