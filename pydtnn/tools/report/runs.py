"""Runs as a report reads them: the files of their folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.tools.report.section import SectionSource, colour
from pydtnn.tools.runs.run import Run as StoredRun
from pydtnn.tools.runs.run import differences, read_run
from pydtnn.tools.tracing import Steps, Timeline, load_timeline
from pydtnn.tools.tracing.analysis import Blocks, Labels, find_blocks, label

HOW = (
    "trace a few steps with python -m pydtnn.train --trace FOLDER:steps=10:20, and add "
    "--trace FOLDER to the command of the report"
)
"""How to obtain what a section without data would show."""


class RunTrace:
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

    @property
    def steps(self) -> Steps:
        """The steps of the timeline."""
        return self.timeline.steps

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


def read_traced(place: Path) -> RunTrace:
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
    return RunTrace(timeline)


MAX_TITLE_OPTIONS = 3
"""Maximum number of swept options in a title."""


@dataclass
class RunView(StoredRun):
    """The files of a run, and how the report shows it.

    Attributes
    ----------
    label : str
        Name in figures and tables: the end of the folder's path that differs from other runs.
    colour : str
    swept : dict
        Options of the command line that differ between the runs of the report.
    traced : Traced or None
        Its trace, if there is one.
    untraced : str
        Why the trace that was found cannot be shown; empty if there is no such trace.
    """

    label: str = ""
    colour: str = ""
    swept: dict[str, Any] = field(default_factory=dict)
    traced: RunTrace | None = None
    untraced: str = ""

    @property
    def title(self) -> str:
        """The label, with the first of the swept options."""
        swept = [f"{name.replace('_', ' ')} {value}" for name, value in self.swept.items()]
        return f"{self.label} ({', '.join(swept[:MAX_TITLE_OPTIONS])})" if swept else self.label


def read_runs(folders: Sequence[str | Path], traces: Sequence[str] = ()) -> list[RunView]:
    """Read the folders of runs.

    Parameters
    ----------
    folders : sequence of str or Path
    traces : sequence of str
        Folders of the traces of the first runs; those of others are found by `find_trace`.

    Raises
    ------
    ValueError, OSError
        If a folder is given twice, contains no run or no completed epoch, or a file is damaged;
        or if there are more traces than runs, or a trace in `traces` cannot be read.
    """
    if len(traces) > len(folders):
        raise ValueError(
            f"report: --trace: expected at most one trace per run, got {len(traces)} for "
            f"{len(folders)}; name each run"
        )
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(paths):
        if resolved[index] in resolved[:index]:
            raise ValueError(f"report: {path} is given twice; name each run once")
    labels = _labels(resolved)
    places = [*traces, *[None] * (len(paths) - len(traces))]
    runs = [_read_run(*parts) for parts in zip(paths, labels, places, strict=True)]
    for number, run in enumerate(runs):
        run.colour = colour(number)
    for name, values in differences(runs).items():
        for run, value in zip(runs, values, strict=True):
            run.swept[name] = value
    return runs


def _why_untraced(runs: Sequence[RunView]) -> str:
    """Return why no run has a trace, and how to record one."""
    reasons = [run.untraced for run in runs if run.untraced]
    return reasons[0] if reasons else f"no run has a trace; {HOW}"


def _without_file(name: str, also: str) -> Callable[[Sequence[RunView]], str]:
    return lambda runs: f"no run has the file {name}, which python -m pydtnn.train{also}"


TRACE = SectionSource(lambda run: run.traced, _why_untraced)

MESSAGES = SectionSource(
    lambda run: run.traced if run.traced and run.traced.timeline.size > 1 else None,
    lambda runs: (
        "the traces are those of one rank"
        if any(run.traced for run in runs)
        else _why_untraced(runs)
    ),
)
"""Traces of several ranks."""

MEASUREMENTS = SectionSource(
    lambda run: run.ranks,
    _without_file("measurements.jsonl", " and the callback MeasurementWriter write"),
)

ABOUT = SectionSource(lambda run: run.about, _without_file("run.json", " writes"))

ENVIRONMENT = SectionSource(
    lambda run: (
        run.about.get("environment") if isinstance(run.about.get("environment"), dict) else None
    ),
    ABOUT.why_absent,
)


def _read_run(folder: Path, label: str, trace: str | None) -> RunView:
    run = RunView(**vars(read_run("report", folder)), label=label)
    if not run.history:
        raise ValueError(
            f"report: {folder} contains a run without a completed epoch; wait until its first "
            "epoch is complete"
        )
    place = find_trace(folder, run.about) if trace is None else Path(trace)
    try:
        run.traced = None if place is None else read_traced(place)
    except ValueError as error:
        if trace is not None:
            raise
        run.untraced = str(error)
    return run


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return for each path its shortest end, of whole names, that is unique.

    >>> _labels([Path("/a/x"), Path("/b/x"), Path("/b/y")])
    ['a/x', 'b/x', 'y']
    """
    labels = []
    for path in paths:
        for count in range(1, len(path.parts) + 1):
            end = path.parts[-count:]
            if sum(other.parts[-count:] == end for other in paths) == 1:
                break
        labels.append("/".join(end).replace("//", "/"))
    return labels
