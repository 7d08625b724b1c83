"""The processes of the ranks of a program under mpiexec, to be stopped and signalled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from tests.launch import Program

MONITOR = b"monitor/process.py"
"""Part of the command of the monitor process."""

VARIABLES = ("PMI_RANK=", "OMPI_COMM_WORLD_RANK=")


def ranks_of(processes: Iterable[int]) -> dict[int, int]:
    """Return the process of each rank among some, without those that ranks have started."""
    found: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            for entry in Path(f"/proc/{process}/environ").read_bytes().decode().split("\0"):
                if entry.startswith(VARIABLES) and MONITOR not in command:
                    found.setdefault(int(entry.partition("=")[2]), process)
    return found


def rank_processes(program: Program) -> dict[int, int]:
    """Return the process of each rank of a program."""
    return ranks_of(program.descendants())


def monitor_process(program: Program) -> int:
    """Return the monitor process of this host."""
    for process in program.descendants():
        with contextlib.suppress(OSError):
            if MONITOR in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
    raise AssertionError("there is no monitor process")


def wait_for(condition: object, seconds: float = 300.0) -> None:
    """Call a function until what it returns is true."""
    end = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
