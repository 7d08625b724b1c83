"""Times, bytes and memory of every epoch, in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Callback, Training, write_if_possible
from pydtnn.utils import clock
from pydtnn.utils.files import unwritable
from pydtnn.utils.machine import peak_memory

FILE = "measurements.jsonl"

MAX_INTERVALS = 50
"""Parts of an epoch whose loss, learning rate and duration are written."""


class Mark(NamedTuple):
    """State at the end of an interval: steps of the epoch, s, samples of all epochs, rate."""

    step: int
    time: float
    samples: int
    lr: float


class MeasurementWriter(Callback):
    """Append a line to ``measurements.jsonl`` after every epoch, for `python -m pydtnn report`.

    Each line is a JSON object: "epoch", counted from 1; "intervals", at most 50 parts of the epoch
    with the number of the last step ("step"), the duration in s ("seconds"), the samples of all
    ranks ("samples"), the mean loss of the steps ("loss"; null if it is not finite) and the
    learning rate ("lr"); and "ranks", an object per rank with "total", the time from the start of
    the epoch to its end in s, the parts of it in `Trainer.seconds` ("steps", "communication",
    "data", "evaluation"), "bytes" sent in the epoch, "peak_memory" of the process so far in B and,
    if it is measured, "step_memory", that of the steps without interpreter and data.

    A run that is resumed appends to the file; of two lines for an epoch the last one is valid.

    Parameters
    ----------
    directory : str or Path
        Created if necessary.
    memory : object, optional
        Its attribute `grown` is the memory of the steps, in B.
    """

    reads_gradients = False

    def __init__(self, directory: str | Path, memory: Any = None) -> None:
        self.directory, self.memory = Path(directory), memory
        self._steps = self._losses = self._bytes = 0
        self._seconds: dict[str, float] = {}
        self._marks: list[Mark] = []

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Create the file, so that an error of the folder is raised before any work.

        Collective: all ranks call it. The file of an earlier run is replaced unless it continues.
        """
        self._steps = steps
        on_rank_0(trainer.comm, self._write, "", "a" if trainer.epoch + trainer.step else "w")

    def on_epoch_start(self, trainer: Training) -> None:
        """Start the clock."""
        self._seconds, self._bytes = dict(trainer.seconds), trainer.comm.traffic.bytes
        self._losses = len(trainer.losses)
        self._marks = []
        self._mark(trainer)

    def on_step_end(self, trainer: Training) -> None:
        """Read the clock at the end of an interval."""
        if trainer.step % -(-self._steps // MAX_INTERVALS) == 0 or trainer.step == self._steps:
            self._mark(trainer)

    def on_epoch_end(self, trainer: Training) -> None:
        """Write. Collective: all ranks call it; rank 0 writes, or warns if it cannot."""
        own = {name: trainer.seconds[name] - before for name, before in self._seconds.items()}
        own["total"] = clock.now() - self._marks[0].time
        own["bytes"] = trainer.comm.traffic.bytes - self._bytes
        own["peak_memory"] = peak_memory()
        if self.memory is not None:
            own["step_memory"] = self.memory.grown
        ranks = trainer.comm.gather_object(own)
        intervals = summarise(self._marks, trainer.losses[self._losses :])
        line = {"epoch": trainer.epoch, "intervals": intervals, "ranks": ranks}
        write_if_possible(trainer.comm, self._write, json.dumps(line) + "\n", "a")

    def _mark(self, trainer: Training) -> None:
        now, rate = clock.now(), trainer.optimizer.lr_now
        self._marks.append(Mark(trainer.step, now, trainer.samples_seen, rate))

    def _write(self, text: str, mode: str) -> None:
        path = self.directory / FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with path.open(mode) as file:
                file.write(text)
        except OSError as error:
            raise unwritable("MeasurementWriter", path, error) from error


def summarise(marks: Sequence[Mark], losses: Sequence[float]) -> dict[str, list[Any]]:
    """Return the intervals between marks; `losses` are those of the steps after the first mark.

    >>> summarise([Mark(0, 10.0, 0, 0.1), Mark(2, 10.5, 64, 0.2)], [3.0, 2.0])
    {'step': [2], 'seconds': [0.5], 'samples': [64], 'loss': [2.5], 'lr': [0.2]}
    """
    rows = [
        (
            mark.step,
            round(mark.time - before.time, 6),
            mark.samples - before.samples,
            _mean(losses[before.step - marks[0].step : mark.step - marks[0].step]),
            mark.lr,
        )
        for before, mark in pairwise(marks)
    ]
    columns = zip(*rows, strict=True) if rows else ((),) * 5
    names = "step", "seconds", "samples", "loss", "lr"
    return {name: [*column] for name, column in zip(names, columns, strict=True)}


def _mean(losses: Sequence[float]) -> float | None:
    """Return the mean; None where JSON has no value for it."""
    mean = sum(losses) / len(losses) if losses else math.nan
    return mean if math.isfinite(mean) else None
