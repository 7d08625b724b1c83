"""Analysis of traces: where time went, what waited for what, and which rank was slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.tools.tracing.analysis.blocks import Blocks, Labels, describe_label, find_blocks, label
from pydtnn.tools.tracing.analysis.difference import Change, compare, step_durations
from pydtnn.tools.tracing.analysis.efficiency import Efficiency, efficiency
from pydtnn.tools.tracing.analysis.path import CriticalPaths, Path, PathPart, PathSegment
from pydtnn.tools.tracing.analysis.states import State, States, find_states
from pydtnn.tools.tracing.analysis.times import (
    Machine,
    Rate,
    Slow,
    Time,
    Usage,
    layer_times,
    machine,
    operation_times,
    phase_times,
    rates,
    slow_ranks,
    times,
    traffic,
    usage,
    waits,
)
from pydtnn.utils.moved import renamed

__all__ = [
    "Blocks",
    "Change",
    "CriticalPaths",
    "Efficiency",
    "Labels",
    "Machine",
    "Path",
    "PathPart",
    "PathSegment",
    "Rate",
    "Slow",
    "State",
    "States",
    "Time",
    "Usage",
    "compare",
    "describe_label",
    "efficiency",
    "find_blocks",
    "find_states",
    "label",
    "layer_times",
    "machine",
    "operation_times",
    "phase_times",
    "rates",
    "slow_ranks",
    "step_durations",
    "times",
    "traffic",
    "usage",
    "waits",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = renamed(__name__)
