"""Runs of the command line that last a fraction of a second, and what they leave behind."""

from __future__ import annotations

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


def only_line(told: str) -> str:
    """The only line on the standard error, which is no traceback."""
    lines = told.splitlines()
    assert len(lines) == 1, told
    assert "Traceback" not in told
    return lines[0]


def is_gone(process: int) -> bool:
    """Whether a process is no more, or a zombie, for which nobody has waited yet."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
