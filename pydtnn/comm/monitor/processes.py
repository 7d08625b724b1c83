"""The state of a process, as the system reports it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Condition(NamedTuple):
    """Why a process does not run; `why` is empty if it can run.

    Attributes
    ----------
    why : str
        "stopped by a signal ...", "swapped out (120 MiB in swap)", "has ended", ...
    frozen : bool
        Whether it cannot act, so that the time that passes is not time that it waits.
    """

    why: str = ""
    frozen: bool = False


def condition_of(pid: int, proc: Path = PROC) -> Condition:
    """Return why a process does not run, from its state and its memory in swap."""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return Condition("has ended", frozen=True)
    except (OSError, IndexError):  # such as too many open files: nothing is known of the process
        return Condition()
    if state in "Tt":
        by = "a signal (SIGSTOP)" if state == "T" else "a debugger"
        return Condition(f"stopped by {by}", frozen=True)
    if state in "ZX":
        return Condition("has ended", frozen=True)
    if state == "D":
        swapped = _swapped(proc / str(pid) / "status")
        if swapped:
            return Condition(f"swapped out ({swapped >> 20} MiB in swap)")
        return Condition("waits for a disk or a file system")
    return Condition()


def _swapped(status: Path) -> int:
    """Return the memory of a process that is in swap, in B."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in status.read_text().splitlines():
            if line.startswith("VmSwap:"):
                return 1024 * int(line.split()[1])
    return 0


def find_ranks(parent: int, variable: bytes = b"PMI_RANK") -> dict[int, int]:
    """Return a pidfd of each rank that a process of the launcher has started, and the rank.

    The number of a rank is in an environment variable; by default that of MPICH's launcher.
    """
    found = {}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            with open(f"/proc/{process}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) != parent:
                    continue
            with open(f"/proc/{process}/environ", "rb") as file:
                environment = b"\0" + file.read()
            rank = int(environment.partition(b"\0%b=" % variable)[2].partition(b"\0")[0])
            found[os.pidfd_open(int(process))] = rank
    return found
