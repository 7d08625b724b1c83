"""Analysis of traces: where time went, what waited for what, and which rank was slow."""

from __future__ import annotations

from pydtnn.tools.tracing.analysis.blocks import Blocks, Labels, describe_label, find_blocks, label
from pydtnn.tools.tracing.analysis.difference import Change, compare, step_durations
from pydtnn.tools.tracing.analysis.efficiency import Efficiency, efficiency
from pydtnn.tools.tracing.analysis.path import CriticalPaths, Part, Path, Segment
from pydtnn.tools.tracing.analysis.states import State, States, find_states
from pydtnn.tools.tracing.analysis.times import (
    EpochTime,
    Machine,
    Rate,
    Slow,
    Time,
    Usage,
    epoch_times,
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

__all__ = [
    "Blocks",
    "find_blocks",
    "Labels",
    "label",
    "describe_label",
    "Time",
    "times",
    "phase_times",
    "layer_times",
    "operation_times",
    "EpochTime",
    "epoch_times",
    "Usage",
    "usage",
    "State",
    "States",
    "find_states",
    "waits",
    "traffic",
    "Rate",
    "Machine",
    "machine",
    "rates",
    "Efficiency",
    "efficiency",
    "CriticalPaths",
    "Path",
    "Part",
    "Segment",
    "Slow",
    "slow_ranks",
    "Change",
    "compare",
    "step_durations",
]
