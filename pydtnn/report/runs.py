"""Runs as a report reads them: the files of their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydtnn.report.section import Source, colour
from pydtnn.tracing import Timeline, load_timeline
from pydtnn.tracing.analysis import Blocks, Labels, find_blocks, label
from pydtnn.utils.files import read_file

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


@dataclass
class Intervals:
    """The intervals of an epoch, as arrays of equal length.

    Attributes
    ----------
    epoch : int
        Counted from 1.
    step : ndarray
        Last step of each interval, counted from 1.
    seconds, samples : ndarray
        Duration in s, and samples of all ranks.
    loss, lr : ndarray
        Mean training loss, NaN if it is not finite, and learning rate.
    """

    epoch: int
    step: np.ndarray
    seconds: np.ndarray
    samples: np.ndarray
    loss: np.ndarray
    lr: np.ndarray

    @property
    def steps(self) -> int:
        """Number of steps that the intervals cover; the first may be cut off by resuming."""
        first = self.step[1] - self.step[0] if len(self.step) > 1 else self.step[0]
        return round(self.step[-1] - self.step[0] + min(first, self.step[0]))

    def position(self) -> np.ndarray:
        """Return the number of epochs completed at the end of each interval, with fractions."""
        return self.epoch - 1 + self.step / self.step[-1]

    @property
    def rate(self) -> np.ndarray:
        """Samples per second of each interval."""
        return self.samples / self.seconds

    def merged(self, count: int) -> Intervals:
        """Return at most `count` intervals, each of which consists of neighbours."""
        size = len(self.step)
        if size <= count:
            return self
        first = np.unique(np.arange(count) * size // count)
        last = np.append(first[1:], size) - 1
        return Intervals(
            self.epoch,
            self.step[last],
            np.add.reduceat(self.seconds, first),
            np.add.reduceat(self.samples, first),
            np.add.reduceat(self.loss, first) / (last - first + 1),
            self.lr[last],
        )


def read_intervals(epoch: int, columns: Mapping[str, Sequence[Any]]) -> Intervals:
    """Return the intervals of a line of ``measurements.jsonl``.

    Raises
    ------
    ValueError, TypeError, LookupError, OverflowError
        If a column is missing or invalid.
    """
    names = "step", "seconds", "samples", "loss", "lr"
    arrays = [np.array(columns[name], float) for name in names]
    lengths = {array.shape for array in arrays}
    step, seconds, samples, _, _ = arrays
    if len(lengths) != 1 or step.ndim != 1 or not step.size:
        raise ValueError("the columns must be lists of equal length")
    if not (np.diff(step, prepend=0) > 0).all() or not (seconds > 0).all():
        raise ValueError("steps must increase and durations must be positive")
    if not np.isfinite([step, seconds, samples]).all():
        raise ValueError("numbers must be finite")
    return Intervals(epoch, *arrays)


MEMORY = ("peak_memory", "step_memory")
"""Memory of a rank so far; the second is 0 if it was not measured."""

PARTS = ("steps", "communication", "data", "evaluation", "total", "bytes", *MEMORY)
"""Numbers of a rank in an epoch."""

MAX_TITLE_OPTIONS = 3
"""Maximum number of swept options in a title."""

NOT_SWEPT = ("output_dir", "trace", "trace_steps", "resume", "progress", "verbose", "quiet", "save")
"""Options that do not describe an experiment."""


@dataclass
class Run:
    """The files of a run.

    Attributes
    ----------
    folder : Path
    label : str
        Name in figures and tables: the end of the folder's path that differs from other runs.
    colour : str
    swept : dict
        Options of the command line that differ between the runs of the report.
    about : dict
        Content of run.json; empty if a program has trained without it.
    history : list of dict
        Loss, metrics and learning rate of each epoch; None if a value is not finite.
    intervals : list of Intervals
        One for each epoch that has been measured.
    ranks : list of list of dict
        For each of these epochs, and each rank: the numbers of `PARTS`.
    traced : Traced or None
        Its trace, if there is one.
    untraced : str
        Why the trace that was found cannot be shown; empty if there is no such trace.
    """

    folder: Path
    label: str
    about: dict[str, Any]
    history: list[dict[str, float | None]]
    colour: str = ""
    swept: dict[str, Any] = field(default_factory=dict)
    intervals: list[Intervals] = field(default_factory=list)
    ranks: list[list[dict[str, float]]] = field(default_factory=list)
    traced: Traced | None = None
    untraced: str = ""

    @property
    def size(self) -> int | None:
        """Number of ranks; None if it is unknown."""
        size = self.about.get("ranks")
        return size if isinstance(size, int) else len(self.ranks[-1]) if self.ranks else None

    @property
    def configuration(self) -> dict[str, Any]:
        """Options of the command line; empty if they are unknown."""
        return self.entry("configuration")

    def entry(self, name: str) -> dict[str, Any]:
        """Return an object in run.json; empty if there is none."""
        value = self.about.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def title(self) -> str:
        """The label, with the first of the swept options."""
        swept = [f"{name.replace('_', ' ')} {value}" for name, value in self.swept.items()]
        return f"{self.label} ({', '.join(swept[:MAX_TITLE_OPTIONS])})" if swept else self.label

    @property
    def cores(self) -> int | None:
        """Number of cores of all hosts that the ranks could use; None if it is unknown."""
        try:
            usable = self.about["environment"]["cpu"]["usable"]
            found = int(usable) * int(self.about["hosts"])
        except (LookupError, TypeError, ValueError):
            return None
        return found if found > 0 else None

    @property
    def threads(self) -> int:
        """Number of threads of all ranks; 0 if it is unknown."""
        threads = self.about.get("threads")
        return (self.size or 0) * threads if isinstance(threads, int) else 0

    def places(self) -> str:
        """Return ranks, threads and cores in words, such as "2 x 1 thread on 2 cores"."""
        text = str(self.size or "\N{EN DASH}")
        if self.size and self.threads:
            each = self.threads // self.size
            text += f" x {each} thread{'s' * (each > 1)}"
        return f"{text} on {self.cores} core{'s' * (self.cores > 1)}" if self.cores else text

    def totals(self) -> list[dict[str, float]]:
        """Return the numbers of `PARTS` of each rank, summed over the epochs.

        Of an epoch with another number of ranks, as after resuming on others, nothing is added.
        Memory is the maximum.
        """
        last = self.ranks[-1] if self.ranks else []
        alike = [ranks for ranks in self.ranks if len(ranks) == len(last)]
        return [
            {
                part: (max if part in MEMORY else sum)(ranks[rank][part] for ranks in alike)
                for part in PARTS
            }
            for rank in range(len(last))
        ]

    def samples_per_second(self) -> float | None:
        """Return the median of the intervals; None if none was measured."""
        return self.spread()[1] if self.intervals else None

    def spread(self) -> tuple[float, float, float]:
        """Return the quartiles of the samples per second of the intervals, of which there are."""
        rates = np.concatenate([epoch.rate for epoch in self.intervals])
        low, middle, high = np.quantile(rates, (0.25, 0.5, 0.75)).tolist()
        return low, middle, high


def read_runs(folders: Sequence[str | Path], traces: Sequence[str] = ()) -> list[Run]:
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
    known = [run.configuration for run in runs if run.configuration]
    for name in dict.fromkeys(name for options in known for name in options):
        if name not in NOT_SWEPT and len({str(options.get(name)) for options in known}) > 1:
            for run in runs:
                run.swept[name] = run.configuration.get(name)
    return runs


def _why_untraced(runs: Sequence[Run]) -> str:
    """Return why no run has a trace, and how to record one."""
    reasons = [run.untraced for run in runs if run.untraced]
    return reasons[0] if reasons else f"no run has a trace; {HOW}"


def _without_file(name: str, also: str = "") -> Callable[[Sequence[Run]], str]:
    return lambda runs: f"no run has the file {name}, which python -m pydtnn.train{also}"


TRACE = Source(lambda run: run.traced, _why_untraced)

MESSAGES = Source(
    lambda run: run.traced if run.traced and run.traced.timeline.size > 1 else None,
    lambda runs: (
        "the traces are those of one rank"
        if any(run.traced for run in runs)
        else _why_untraced(runs)
    ),
)
"""Traces of several ranks."""

MEASUREMENTS = Source(
    lambda run: run.ranks,
    _without_file("measurements.jsonl", " and the callback MeasurementWriter write"),
)

ABOUT = Source(lambda run: run.about, _without_file("run.json", " writes"))

ENVIRONMENT = Source(
    lambda run: (
        run.about.get("environment") if isinstance(run.about.get("environment"), dict) else None
    ),
    ABOUT.why_absent,
)


def _read_run(folder: Path, label: str, trace: str | None) -> Run:
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"report: {folder} {reason}; give the folder of a run")
    if not (folder / "history.json").is_file():
        raise ValueError(
            f"report: {folder} contains no run, as history.json is missing; give the folder that "
            'a run prints as "run folder"'
        )
    history = [_numbers(folder, entry) for entry in _parse(folder / "history.json", list)]
    if not history:
        raise ValueError(
            f"report: {folder} contains a run without a completed epoch; wait until its first "
            "epoch is complete"
        )
    about = _parse(folder / "run.json", dict) if (folder / "run.json").is_file() else {}
    run = Run(folder, label, about, history)
    place = find_trace(folder, about) if trace is None else Path(trace)
    try:
        run.traced = None if place is None else read_traced(place)
    except ValueError as error:
        if trace is not None:
            raise
        run.untraced = str(error)
    found = _measurements(folder / "measurements.jsonl")
    for number in sorted(found):
        if number <= len(history):  # those after it were repeated from an older checkpoint
            run.intervals.append(found[number][0])
            run.ranks.append(found[number][1])
    return run


Measured = tuple[Intervals, list[dict[str, float]]]


def _measurements(file: Path) -> dict[int, Measured]:
    """Return the last line of each epoch; lines cut short by the end of a process are skipped."""
    found = {}
    for line in read_file("report", file).splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
            number = int(entry["epoch"])
            each = [{"step_memory": 0} | rank for rank in entry["ranks"]]
            ranks = [{part: float(rank[part]) for part in PARTS} for rank in each]
            measured = read_intervals(number, entry["intervals"]), ranks
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            continue
        if ranks and all(0 <= rank[part] < math.inf for rank in ranks for part in PARTS):
            found[number] = measured
    return found


def _numbers(folder: Path, entry: Any) -> dict[str, float | None]:
    """Return the finite numbers of an epoch, and None for others."""
    if not isinstance(entry, Mapping):
        raise _damaged(folder / "history.json", "it must contain an object for each epoch")
    return {name: _finite(value) for name, value in entry.items() if name != "epoch"}


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _parse(file: Path, kind: type) -> Any:
    try:
        content = json.loads(read_file("report", file))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "it cannot be parsed") from error
    if not isinstance(content, kind):
        raise _damaged(file, f"it must contain {'a list' if kind is list else 'an object'}")
    return content


def _damaged(file: Path, reason: str) -> ValueError:
    return ValueError(f"report: {file} is damaged: {reason}; give the folder of another run")


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
