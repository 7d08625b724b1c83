"""Curves, histograms and hyper-parameters for TensorBoard."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm.agree import on_rank_0
from pydtnn.comm.checks import to_host
from pydtnn.training.callback import Callback, Training, write_if_possible
from pydtnn.utils import clock
from pydtnn.utils.files import unwritable
from pydtnn.utils.imports import import_optional
from pydtnn.utils.validate import check_int

# Event files of TensorBoard: curves, histograms, hyper-parameters.
#
# An event file is a sequence of records with checksums, each a protocol buffer; tensorboardX has
# both formats. Its `SummaryWriter` is not used, as it writes in a thread whose errors are lost.

WHO = "TensorBoard"

HISTOGRAM_BINS = 64
"""Bins of a histogram."""

SCALARS = (bool, int, float, str)
"""Types of hyper-parameters that TensorBoard compares; others are written as JSON."""


def require_package() -> None:
    """Raise ImportError if tensorboardX is missing."""
    _module("summary")


def _module(name: str) -> Any:
    return import_optional(f"tensorboardX.{name}", "tensorboardX", WHO)


class EventFile:
    """A new event file in a folder.

    Parameters
    ----------
    directory : Path
        Created if necessary.
    step : int
        Steps of training so far: values that other files of the folder have of later steps, written
        before training was continued from an earlier checkpoint, are not shown.

    Raises
    ------
    OSError
        If it cannot be written, like all methods.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.directory = directory
        self._summary = _module("summary")
        self._messages = _module("proto.event_pb2")
        writer = _module("event_file_writer").EventsWriter
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = writer(str(directory / "events"), f".{step}")
        except OSError as error:
            raise unwritable(WHO, directory, error) from error
        start = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(step + 1, session_log=start)

    def _write(self, step: int, **content: Any) -> None:
        event = self._messages.Event(wall_time=time.time(), step=step, **content)
        try:
            self._writer.write_event(event)
        except OSError as error:
            raise unwritable(WHO, self.directory, error) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve."""
        for name, value in values.items():
            self._write(step, summary=self._summary.scalar(name, float(value)))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Write a histogram of the finite elements of an array, if there are any."""
        finite = values[np.isfinite(values)]
        if len(finite):
            self._write(step, summary=self._summary.histogram(name, finite, HISTOGRAM_BINS))

    def hyper_parameters(self, values: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Write hyper-parameters, and the names of the curves that are compared with them."""
        plain = {
            name: value if isinstance(value, SCALARS) else json.dumps(value, default=str)
            for name, value in values.items()
            if value is not None
        }
        for part in self._summary.hparams(plain, {**results}):
            self._write(0, summary=part)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._writer.flush()
        except OSError as error:
            raise unwritable(WHO, self.directory, error) from error

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def describe_training(trainer: Training) -> dict[str, Any]:
    """Return the hyper-parameters of a trainer; "lr" is the present learning rate."""
    optimizer, model = trainer.optimizer, trainer.model
    return {
        "optimizer": type(optimizer).__name__,
        "lr": optimizer.lr_now,
        "weight_decay": optimizer.weight_decay,
        "scheme": type(trainer.exchange).__name__,
        "ranks": trainer.comm.size,
        "dtype": str(model.dtype),
        "parameters": model.whole.size,
    }


FLUSH_INTERVAL_S = 10.0
"""Seconds after which values of steps are visible in TensorBoard."""


class TensorBoard(Callback):
    """Write event files for TensorBoard (``tensorboard --logdir directory``) on rank 0.

    - Curves: after every epoch what `Trainer.history` contains ("loss", "val_accuracy", "lr", ...)
      and "samples_per_second"; during an epoch "step/loss", "step/lr" and
      "step/samples_per_second". Samples per second are those of training, without evaluations. The
      horizontal axis is the number of updates since the beginning of training, so that runs that
      are resumed continue their curves. "step/loss" is over the samples of all ranks; schemes whose
      ranks train independently sum it every few steps (`Trainer.own_steps`), until when its points
      are not written.
    - Histograms of each parameter and its gradient, if requested. Gradients are those of the last
      step as rank 0 has them: the sums over all ranks or, in schemes that distribute or do not
      compute these sums, its own part. On a mesh, both are those of rank 0's part of the network.
    - Hyper-parameters with the results, when training ends.

    Requires the package tensorboardX (``pip install tensorboardX``).

    Parameters
    ----------
    directory : str or Path
        Created if necessary; one folder per run.
    every_steps : int, optional
        Steps between two points of the curves within epochs; None writes none.
    histograms : int, optional
        Epochs between two histograms; by default there are none.
    hyper_parameters : mapping, optional
        Further values to compare runs by, besides those of the trainer: "optimizer", "lr",
        "weight_decay", "scheme", "ranks", "dtype" and "parameters".

    Raises
    ------
    AgreedError
        On all ranks, if the package is missing when training starts, or a file cannot be written.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every_steps: int | None = 10,
        histograms: int | None = None,
        hyper_parameters: Mapping[str, Any] | None = None,
    ) -> None:
        who = type(self).__name__
        self.directory = Path(directory)
        self.every_steps, self.histograms = (
            None if value is None else check_int(who, name, value, at_least=1)
            for name, value in (("every_steps", every_steps), ("histograms", histograms))
        )
        self.reads_gradients = self.histograms is not None
        self.hyper_parameters = dict(hyper_parameters or {})
        self._file: EventFile | None = None
        self._error: OSError | None = None  # of a step, until all ranks can be told
        self._first = 0  # updates before the first of `Trainer.losses`
        self._points: deque[int] = deque()  # of these, those that are to be written
        self._seen, self._begin = 0, 0.0  # samples and time at the last point
        self._epoch_seen, self._epoch_begin, self._epoch_end, self._flushed = 0, 0.0, 0.0, 0.0
        self._lr = 0.0

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Create the file. Collective: all ranks call it; rank 0 writes."""
        self._first = trainer.optimizer.iterations - len(trainer.losses)
        self._lr, self._error = trainer.optimizer.lr_now, None
        self._points.clear()
        on_rank_0(trainer.comm, self._open, trainer)

    def _open(self, trainer: Training) -> None:
        require_package()
        self.close()
        self._file = EventFile(self.directory, trainer.optimizer.iterations)
        self._file.flush()

    def on_epoch_start(self, trainer: Training) -> None:
        """Start the clock."""
        self._epoch_begin = self._epoch_end = self._begin = self._flushed = clock.now()
        self._epoch_seen = self._seen = trainer.samples_seen

    def on_step_end(self, trainer: Training) -> None:
        """Write points of curves, if it is time."""
        every, step = self.every_steps, trainer.optimizer.iterations
        now = self._epoch_end = clock.now()
        if self._file is None or not every or step % every or self._error or not trainer.losses:
            return
        speed = (trainer.samples_seen - self._seen) / (now - self._begin)
        self._points.append(len(trainer.losses) - 1)  # a captured step is not complete yet
        try:
            self._write_losses(trainer)
            rate = trainer.optimizer.lr_now
            self._file.scalars(step, {"step/lr": rate, "step/samples_per_second": speed})
            if now - self._flushed > FLUSH_INTERVAL_S:
                self._file.flush()
                self._flushed = now
        except OSError as error:
            self._error = error
        self._seen, self._begin = trainer.samples_seen, now

    def _write_losses(self, trainer: Training) -> None:
        """Write the points of losses that are those of all ranks."""
        assert self._file is not None
        while self._points and self._points[0] < len(trainer.losses) - trainer.own_steps:
            place = self._points.popleft()
            self._file.scalars(self._first + place + 1, {"step/loss": trainer.losses[place]})

    def on_epoch_end(self, trainer: Training) -> None:
        """Write the results of the epoch. Collective: all ranks call it; rank 0 writes."""
        write_if_possible(trainer.comm, self._write_epoch, trainer)

    def _write_epoch(self, trainer: Training) -> None:
        assert self._file is not None
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._write_losses(trainer)
        step, seconds = trainer.optimizer.iterations, self._epoch_end - self._epoch_begin
        values = dict(trainer.logs.numbers)
        if seconds > 0:  # not if the last step was complete when the epoch was resumed
            values["samples_per_second"] = (trainer.samples_seen - self._epoch_seen) / seconds
        self._file.scalars(step, values)
        if self.histograms and trainer.epoch % self.histograms == 0:
            for name, p in reversed(trainer.model.parameters.items()):
                self._file.histogram(step, f"parameters/{name}", to_host(p.master).reshape(-1))
                if p.grad is not None:
                    self._file.histogram(step, f"gradients/{name}", to_host(p.grad).reshape(-1))
        self._file.flush()

    def on_fit_end(self, trainer: Training) -> None:
        """Write the hyper-parameters. Collective: all ranks call it; rank 0 writes."""
        write_if_possible(trainer.comm, self._write_end, trainer)

    def _write_end(self, trainer: Training) -> None:
        assert self._file is not None
        values = {**describe_training(trainer), "lr": self._lr, **self.hyper_parameters}
        results = trainer.history[-1] if trainer.history else {}
        self._file.hyper_parameters(values, {n: v for n, v in results.items() if n != "lr"})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
