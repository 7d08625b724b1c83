"""Ends processes with all that they have started, whatever session it is in."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE = 3.0
"""Seconds between asking a process to end and ending it."""


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started: asked first, then forced."""
    family = [process.pid, *descendants(process.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, number)
        deadline = time.monotonic() + GRACE
        while process.poll() is None or any(map(lives, family)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return


def lives(process: int) -> bool:
    """Whether a process is there, and not only because nobody has asked how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(process: int) -> list[int]:
    """Return the children of a process, and theirs, whatever session they are in."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [process]
    for one in found:
        found.extend(children.get(one, ()))
    return found[1:]
