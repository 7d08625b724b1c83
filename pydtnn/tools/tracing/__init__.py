"""Traces of training: what each rank did, when and for how long."""

from __future__ import annotations

from pydtnn.tools.tracing.records import RECORD, RankTrace, read_traces, write_trace
from pydtnn.tools.tracing.timeline import Steps, Timeline, build_timeline, load_timeline

__all__ = [
    "RECORD",
    "RankTrace",
    "read_traces",
    "write_trace",
    "Timeline",
    "Steps",
    "build_timeline",
    "load_timeline",
]
