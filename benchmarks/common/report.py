"""What every table begins with: the machine, the versions, the state of the code, the command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from pydtnn.utils.machine import cpu_name

WITH_TORCH = importlib.util.find_spec("torch") is not None
"""Whether PyTorch can be imported: without it, tables show our side alone."""


class Report:
    """A table that is printed and, if a path is given, written to a file as well.

    Parameters
    ----------
    path : Path, optional
        Overwritten.
    keep : bool
        Append to it instead.
    """

    def __init__(self, path: Path | None = None, *, keep: bool = False) -> None:
        self.file: TextIO | None = path.open("a" if keep else "w") if path else None
        for line in describe():
            self.line(line)

    def line(self, text: str = "") -> None:
        """Write a line at once, so that a long run can be followed."""
        for file in (sys.stdout, self.file):
            if file:
                print(text.rstrip(), file=file, flush=True)


def describe() -> list[str]:
    """Name the processor, the versions, the commit and the command."""
    torch = importlib.metadata.version("torch") if WITH_TORCH else "absent"
    held = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return [
        *gpu_name(),
        f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, PyTorch {torch}, commit {commit()}",
        f"command: {' '.join([*held, 'python', *sys.orig_argv[1:]])}",
    ]


VARIABLES = ("OPENBLAS_CORETYPE", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "PYDTNN_ISA")
"""What of the environment changes speed: a table says it."""


def gpu_name() -> list[str]:
    """Name the GPU and its driver, in tables of benchmarks that use one."""
    if Path(sys.argv[0]).parent.name != "gpu":
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ["no GPU"]
    return done.stdout.strip().splitlines()


def commit() -> str:
    """Short name of the commit, with a plus if files differ from it; or what PYDTNN_COMMIT says."""
    if name := os.environ.get("PYDTNN_COMMIT"):
        return name
    command = ["git", "describe", "--always", "--dirty=+"]
    root = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
