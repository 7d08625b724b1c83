"""A run as an object: what its folder contains."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.metrics import ALIASES, METRICS
from pydtnn.saving.models import build_model
from pydtnn.saving.weights import decode_weights
from pydtnn.training.checkpoint import find_checkpoints, read_weights
from pydtnn.training.run_folder import (
    BEST_FILE,
    HISTORY_FILE,
    MEASUREMENTS_FILE,
    MODEL_FILE,
    RUN_FILE,
    damaged,
    is_run,
    read_json,
)
from pydtnn.utils.files import MAX_TEXT_B, read_file

if TYPE_CHECKING:
    from pydtnn.kernels import Backend
    from pydtnn.model import Model

VALIDATION = "val_"
"""Beginning of the names of results on the validation set."""

NOT_COMPARED = (
    *("output_dir", "trace", "trace_steps", "resume", "progress", "verbose", "quiet", "save"),
)
"""Options that do not describe an experiment."""

MEMORY = ("peak_memory", "step_memory")
"""Memory of a rank so far; the second is 0 if it was not measured."""

PARTS = ("steps", "communication", "data", "evaluation", "total", "bytes", *MEMORY)
"""Numbers of a rank in an epoch."""


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


@dataclass
class Run:
    """A run of training, as its folder describes it.

    Attributes
    ----------
    folder : Path
    about : dict
        Content of run.json: "configuration", the options of the command line; "command",
        "started", "ranks", "hosts", "threads", "device", "parameters", "environment" (hardware and
        versions), and others; empty if a program has trained without the command line.
    history : list of dict
        Loss, metrics and learning rate of each completed epoch; None if a value is not finite.
    intervals : list of Intervals
        Loss, learning rate and throughput within each epoch that has been measured.
    ranks : list of list of dict
        For each of these epochs, and each rank: the numbers of `PARTS`, times in s and sizes in B.
    """

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float | None]] = field(default_factory=list)
    intervals: list[Intervals] = field(default_factory=list)
    ranks: list[list[dict[str, float]]] = field(default_factory=list)

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
    def epochs(self) -> int:
        """Number of completed epochs."""
        return len(self.history)

    @property
    def planned(self) -> int | None:
        """Number of epochs that the run was started for; None if it is unknown."""
        planned = self.configuration.get("epochs")
        return planned if type(planned) is int else None

    @property
    def state(self) -> str:
        """Whether the run is "finished" or "running", or was "interrupted".

        A run that has stopped early is finished. Runs on other hosts are not seen as running.
        """
        if self.about.get("ended") or self.epochs >= (self.planned or math.inf):
            return "finished"
        return "running" if _is_locked(self.folder) else "interrupted"

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, newest last."""
        return find_checkpoints(self.folder)

    @property
    def monitored(self) -> str:
        """The value by which epochs are compared; empty if there is none.

        The one that the run monitored, otherwise the first metric of the validation, its loss, or
        the loss of training.
        """
        names = [*dict.fromkeys(name for logs in self.history for name in logs)]
        metrics = [name for name in names if name.startswith(VALIDATION) and name != "val_loss"]
        chosen = self.configuration.get("monitor")
        return next((name for name in (chosen, *metrics, "val_loss", "loss") if name in names), "")

    def best(self, name: str = "") -> tuple[int, float] | None:
        """Return the best epoch, counted from 1, and its value; None if there is no value.

        Parameters
        ----------
        name : str
            A loss or metric in the history; by default `monitored`.
        """
        name = name or self.monitored
        found = {epoch: logs.get(name) for epoch, logs in enumerate(self.history, 1)}
        values = {epoch: value for epoch, value in found.items() if value is not None}
        if not values:
            return None
        epoch = (max if better(name) == "max" else min)(values, key=values.__getitem__)
        return epoch, values[epoch]

    def columns(self) -> dict[str, np.ndarray]:
        """Return the history as arrays of equal length, for ``pandas.DataFrame(run.columns())``.

        The first is "epoch", counted from 1; the others are float64, NaN where there is no value.
        """
        names = dict.fromkeys(name for logs in self.history for name in logs)
        values = {
            name: np.array([logs.get(name) for logs in self.history], np.float64) for name in names
        }
        return {"epoch": np.arange(1, self.epochs + 1), **values}

    def model(
        self,
        weights: str | Path = "best",
        *,
        backend: Backend | str = "cpu",
        dtype: str | None = None,
        custom: Mapping[str, type] | None = None,
    ) -> Model:
        """Return the trained model, as `pydtnn.load` does: no code of the run is executed.

        Parameters
        ----------
        weights : str or Path
            "best", those of the best epoch by the value that the run monitored; "last", those of
            the newest checkpoint; or one of `checkpoints`.
        backend, dtype, custom
            See `pydtnn.load`.

        Raises
        ------
        OSError, ValueError
            If a file is missing or damaged, or contains a layer that is not in `custom`.
        """
        who = f"load_run: {self.folder}"
        if not (self.folder / MODEL_FILE).is_file():
            raise ValueError(
                f"{who} contains no {MODEL_FILE}, which is written for layers whose options can be "
                f"saved; build the network, and load {BEST_FILE} with pydtnn.weights.load_weights"
            )
        content = read_file(who, self.folder / MODEL_FILE, MAX_TEXT_B)
        if weights == "best":
            try:
                arrays = decode_weights(read_file(who, self.folder / BEST_FILE))
            except ValueError as error:
                raise ValueError(f"{who}: {BEST_FILE}: {error}") from error
        else:
            if weights == "last" and not self.checkpoints:
                raise ValueError(f"{who} contains no checkpoint; use the weights 'best'")
            arrays = read_weights(self.checkpoints[-1] if weights == "last" else Path(weights))
        return build_model(who, content, arrays, backend=backend, dtype=dtype, custom=custom)

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

    def seconds(self) -> float | None:
        """Return the time of the measured epochs, in s; None if none was measured."""
        return max((rank["total"] for rank in self.totals()), default=None)


def load_run(folder: str | Path) -> Run:
    """Read the folder of a run, as ``python -m pydtnn.train`` prints it.

    Only files of text are read: the model, and weights, are read by `Run.model`.

    Parameters
    ----------
    folder : str or Path

    Returns
    -------
    Run

    Raises
    ------
    OSError, ValueError
        If the folder contains no run, or a file is damaged, too large or not a regular file.

    Examples
    --------
    >>> run = load_run("runs/resnet20-cifar10-1")  # doctest: +SKIP
    >>> run.configuration["lr"], run.best()  # doctest: +SKIP
    (0.1, (182, 0.9213))
    >>> pandas.DataFrame(run.columns()).plot("epoch", "val_accuracy")  # doctest: +SKIP
    """
    return read_run("load_run", folder)


def read_run(who: str, folder: str | Path) -> Run:
    """Read the folder of a run; `who` is the first word of errors."""
    folder = Path(folder)
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{who}: {folder} {reason}; give the folder of a run")
    if not (folder / HISTORY_FILE).is_file() and not is_run(folder):
        raise ValueError(
            f"{who}: {folder} contains no run; give the folder that a run prints as 'run folder'"
        )
    run = Run(folder)
    if (folder / HISTORY_FILE).is_file():
        entries = read_json(who, folder / HISTORY_FILE, list)
        run.history = [_numbers(who, folder, entry) for entry in entries]
    if (folder / RUN_FILE).is_file():
        run.about = read_json(who, folder / RUN_FILE, dict)
    found = _measurements(who, folder / MEASUREMENTS_FILE)
    for number in sorted(found):
        if number <= run.epochs:  # those after it were repeated from an older checkpoint
            run.intervals.append(found[number][0])
            run.ranks.append(found[number][1])
    return run


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the options that differ between runs, with the value of each; None if it is unknown.

    Runs without known options do not count.
    """
    known = [run.configuration for run in runs if run.configuration]
    names = dict.fromkeys(name for options in known for name in options)
    return {
        name: [run.configuration.get(name) for run in runs]
        for name in names
        if name not in NOT_COMPARED and len({str(options.get(name)) for options in known}) > 1
    }


def better(name: str) -> str:
    """Return whether larger or smaller values of a loss or metric are better: "max" or "min".

    >>> better("val_accuracy"), better("val_loss"), better("regression_mse"), better("output1.mae")
    ('max', 'min', 'min', 'min')
    """
    name = name.removeprefix(VALIDATION).rpartition(".")[2]
    name = ALIASES.get(name, name)
    return "min" if name.endswith("loss") else str(getattr(METRICS.get(name), "better", "max"))


def _is_locked(folder: Path) -> bool:
    """Return whether a process of this host has locked the folder, as a run does that writes there.

    The lock is not tried, which could refuse a run that starts at this moment.
    """
    try:
        found = folder.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any("FLOCK" in line and device in line.split() for line in locks.splitlines())


Measured = tuple[Intervals, list[dict[str, float]]]


def _measurements(who: str, file: Path) -> dict[int, Measured]:
    """Return the last line of each epoch; lines cut short by the end of a process are skipped."""
    found = {}
    lines = read_file(who, file, MAX_TEXT_B).splitlines() if file.is_file() else ()
    for line in lines:
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


def _numbers(who: str, folder: Path, entry: Any) -> dict[str, float | None]:
    """Return the finite numbers of an epoch, and None for others."""
    if not isinstance(entry, Mapping):
        raise damaged(who, folder / "history.json", "it must contain an object for each epoch")
    return {name: _finite(value) for name, value in entry.items() if name != "epoch"}


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None
