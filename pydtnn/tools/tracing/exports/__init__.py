"""Traces in the formats of other tools: Perfetto, Paraver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydtnn.tools.tracing.exports.chrome import write_chrome
from pydtnn.tools.tracing.exports.paraver import write_paraver
from pydtnn.tools.tracing.timeline import Timeline


class Format(NamedTuple):
    """A format of traces.

    Attributes
    ----------
    write : callable
        Writes a timeline to a path.
    output : str
        Name of the file if none is given.
    """

    write: Callable[[Timeline, Path], None]
    output: str


FORMATS = {
    "chrome": Format(write_chrome, "trace.json"),
    "paraver": Format(write_paraver, "trace.prv"),
}
"""The formats by name."""

__all__ = [
    "FORMATS",
    "Format",
    "write_chrome",
    "write_paraver",
]
