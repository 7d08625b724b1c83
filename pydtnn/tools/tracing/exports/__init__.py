"""Traces in the formats of other tools: Perfetto, Paraver."""

from pydtnn.tools.tracing.exports.chrome import write_chrome
from pydtnn.tools.tracing.exports.paraver import write_paraver

FORMATS = {"chrome": (write_chrome, "trace.json"), "paraver": (write_paraver, "trace.prv")}
"""Functions that write a timeline to a path, and the names of their files, by format."""

__all__ = ["FORMATS", "write_chrome", "write_paraver"]
