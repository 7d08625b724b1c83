"""Starts the ranks that a benchmark measures, with mpirun or whatever launcher there is."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """What the ranks of a run have measured.

    Attributes
    ----------
    rates : list of float
        Images/s of all ranks, by epoch.
    exposed : list of float
        Share of its time that a step spends on communication which is not hidden, by epoch.
    megabytes : float
        What the rank that sends most sends in a step, in MB.
    memory : float
        Resident memory of the largest rank at its peak, in MB.
    """

    rates: list[float]
    exposed: list[float]
    megabytes: float
    memory: float


def default_launcher() -> str:
    """What starts ranks on this machine: the mpirun beside Python, or that of the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("ranks: there is no mpirun; install pydtnn's extra `mpi`")
    return shlex.join([mpirun, "-np", "{ranks}"])


def launch(launcher: str, ranks: int, threads: int, command: list[str], nodes: int = 1) -> str:
    """Run a command on several ranks and return what it prints.

    Parameters
    ----------
    launcher : str
        What to put before the command; ``{ranks}`` and ``{nodes}`` stand for their numbers.
    ranks, threads : int
        Number of ranks, and of threads of each.
    command : list of str
    nodes : int
        On how many nodes the ranks fit.

    Ends this program, with what was printed, where a rank fails.
    """
    before = [word.format(ranks=ranks, nodes=nodes) for word in shlex.split(launcher)]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    own = {"OMP_NUM_THREADS": str(threads), "MASTER_PORT": str(port)}
    done = subprocess.run(
        [*before, *command],
        env={"MASTER_ADDR": "127.0.0.1"} | kept | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"
        raise SystemExit(f"ranks: `{shlex.join([*before, *command])}` failed:\n{said}")
    return done.stdout


def start(
    side: str,
    name: str,
    batch: int,
    *,
    ranks: int,
    threads: int,
    epochs: int,
    launcher: str | None = None,
    nodes: int = 1,
) -> Run:
    """Let several ranks train (`rank.py`).

    Parameters
    ----------
    side : {"ours", "torch"}
    name : str
        Of the work, in `work.WORK`.
    batch : int
        Of all ranks together.
    ranks, threads, launcher, nodes
        As in `launch`; by default ranks are started on this machine.
    epochs : int
        That are measured; one more goes before.
    """
    numbers = map(str, (ranks, threads, epochs, batch))
    command = [sys.executable, "-m", "benchmarks.comm.rank", side, name, *numbers]
    printed = launch(launcher or default_launcher(), ranks, threads, command, nodes)
    return Run(**json.loads(printed.strip().splitlines()[-1]))
