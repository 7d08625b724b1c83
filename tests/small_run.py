"""Runs of the command line that last a fraction of a second, and what they leave behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

TINY = [
    "--model=mlp",
    '--dataset-options={"samples": 120, "test_samples": 40, "shape": [12, 12, 1], "classes": 4}',
    "--global-batch-size=16",
    "--epochs=2",
    "--threads=1",
]
"""Eight steps an epoch, the last of half a batch."""

TRAIN = ["-m", "pydtnn.train"]

HELD = """
import sys, time
from pydtnn import train
from pydtnn.comm.monitor.supervision import LastStep
passed = LastStep.passed
def held(self):
    end = time.monotonic() + 300 * (self._begun == 95 and "--resume" not in sys.argv)
    while time.monotonic() < end and not (self._held or self._last): time.sleep(0.01)
    return passed(self)
LastStep.passed = held
sys.exit(train.main())
"""
"""The same, for 12 epochs, but in one of the last it waits for a signal, for up to five minutes; a
run that is resumed does not."""


def only_line(told: str) -> str:
    """The only line on the standard error, which is no traceback."""
    lines = told.splitlines()
    assert len(lines) == 1, told
    assert "Traceback" not in told
    return lines[0]


def processes_in(directory: Path) -> list[int]:
    """List the processes that work in a folder; a zombie has none any more."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            if link.readlink() == directory:
                found.append(int(link.parent.name))
    return found
