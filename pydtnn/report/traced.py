"""The trace of a run, with the parts of its analysis that several sections use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydtnn.tracing import Timeline, load_timeline
from pydtnn.tracing.analysis import Blocks, Labels, find_blocks, label

HOW = (
    "trace a few steps with python -m pydtnn.train --trace FOLDER --trace-steps 10:20, and add "
    "--trace FOLDER to the command of the report"
)
"""How to obtain what a section without data would show."""


class Step(NamedTuple):
    """A step of training: its epoch and its number in it, from 0."""

    epoch: int
    number: int


class Traced:
    """A trace with at least one training step that all ranks have recorded.

    Parameters
    ----------
    timeline : Timeline
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    @cached_property
    def blocks(self) -> Blocks:
        """When ranks were inside of their communicators."""
        return find_blocks(self.timeline)

    @cached_property
    def labels(self) -> Labels:
        """What the main threads were doing."""
        return label(self.timeline)

    @cached_property
    def steps(self) -> list[Step]:
        """The steps, in the order of `Timeline.steps`."""
        steps = self.timeline.steps
        return [*map(Step, steps.epochs.tolist(), steps.numbers.tolist())]

    def span(self, position: int) -> tuple[int, int]:
        """Return start and end of a step on any rank, in ns."""
        steps = self.timeline.steps
        return int(steps.start[position].min()), int(steps.stop[position].max())

    def milliseconds(self, position: int) -> float:
        """Return the duration of a step, in ms."""
        start, stop = self.span(position)
        return (stop - start) / 1e6

    def typical(self) -> int:
        """Return the position of the step whose duration is the median."""
        order = sorted(range(len(self.steps)), key=self.milliseconds)
        return order[(len(order) - 1) // 2]

    def slowest(self) -> int:
        """Return the position of the step that takes longest."""
        return max(range(len(self.steps)), key=self.milliseconds)

    def within(self, position: int) -> np.ndarray:
        """Return the positions of the activities that overlap with a step, of all threads."""
        start, stop = self.span(position)
        activities = self.timeline.activities
        return np.flatnonzero((activities["start"] < stop) & (activities["stop"] > start))


def find_trace(folder: Path, about: Mapping[str, Any]) -> Path | None:
    """Return the folder of the trace of a run; None if there is none.

    Parameters
    ----------
    folder : Path
        Of the run; the trace is in its folder "trace", or that of the run's option --trace,
        relative to this folder or to the current one.
    about : mapping
        Content of run.json.
    """
    options = about.get("configuration")
    option = options.get("trace") if isinstance(options, dict) else None
    named = [folder / option, Path(option)] if isinstance(option, str) and option else []
    places = [folder / "trace", *named]
    return next((place for place in places if any(place.glob("rank-*.npz"))), None)


def read_traced(place: Path) -> Traced:
    """Return the trace in a folder.

    Raises
    ------
    ValueError
        If it is incomplete or damaged, or contains no training step.
    """
    timeline = load_timeline(place)
    if not len(timeline.steps):
        raise ValueError(
            f"trace: {place} contains no training step that all ranks have recorded; trace a run "
            "of more steps"
        )
    return Traced(timeline)
