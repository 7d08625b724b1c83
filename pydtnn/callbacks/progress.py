"""Display of progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from pydtnn.training.callback import Callback, Training
from pydtnn.utils.validate import number

REFRESH = 0.1
"""Seconds between two updates of a bar."""


class ProgressBar(Callback):
    """Show step, loss, metrics, learning rate and images/s on rank 0.

    On a terminal it shows a progress bar, and a line for each completed epoch; otherwise plain
    lines, one for each epoch and one every few seconds within it.

    Parameters
    ----------
    file : text stream, optional
        Output stream; by default ``sys.stdout``.
    interval : float
        Seconds between two lines within an epoch without a terminal.
    """

    def __init__(self, file: TextIO | None = None, *, interval: float = 10.0) -> None:
        self.file = file
        self.interval = number("ProgressBar", "interval", interval, at_least=0)
        self._display: _Display | None = None
        self._epochs = 0
        self._pause = 0.0
        self._seen = 0  # samples seen before the epoch
        self._begin = self._now = self._shown = 0.0

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Choose between a bar and lines."""
        self.close()
        if trainer.comm.rank > 0:
            return
        file = self.file or sys.stdout
        bar = file.isatty()
        self._display = _Bar(file, steps) if bar else _Lines(file, steps)
        self._epochs, self._pause = epochs, REFRESH if bar else self.interval

    def on_epoch_start(self, trainer: Training) -> None:
        """Start the timer."""
        if self._display:
            self._display.begin(self._title(trainer.epoch + 1), trainer.step)
        self._seen = trainer.samples_seen
        self._begin = self._now = self._shown = time.perf_counter()

    def on_step_end(self, trainer: Training) -> None:
        """Show the means so far, if the interval has passed."""
        self._now = time.perf_counter()
        if self._display and self._now - self._shown >= self._pause:
            self._shown = self._now
            logs = {**trainer.logs, "lr": trainer.optimizer.lr_now}
            self._display.step(
                self._title(trainer.epoch + 1), trainer.step, self._text(trainer, logs)
            )

    def on_epoch_end(self, trainer: Training) -> None:
        """Show the epoch's results."""
        if self._display:
            text = self._text(trainer, trainer.logs)
            self._display.line(
                f"{self._title(trainer.epoch)}  {text}  {self._now - self._begin:.1f} s"
            )

    def on_fit_end(self, trainer: Training) -> None:
        """Restore the terminal."""
        self.close()

    def close(self) -> None:
        """Restore the terminal."""
        if self._display:
            self._display.close()
            self._display = None

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch}/{self._epochs}"

    def _text(self, trainer: Training, logs: Mapping[str, float]) -> str:
        seconds = self._now - self._begin  # until the last step's end: evaluation is not counted
        rate = (trainer.samples_seen - self._seen) / seconds if seconds else 0.0
        return f"{format_logs(logs)}  {rate:.0f} images/s"


def format_logs(logs: Mapping[str, float]) -> str:
    """Return the values of a log in one line.

    >>> format_logs({"loss": 0.51234, "lr": 0.1})
    'loss 0.5123  lr 0.1'
    """
    return "  ".join(
        f"{name} {value:.3g}" if name == "lr" else f"{name} {value:.4f}"
        for name, value in logs.items()
    )


class _Display(Protocol):
    """Interface of a display."""

    def begin(self, title: str, step: int) -> None:
        """Start an epoch, of which some steps may be complete."""

    def step(self, title: str, step: int, text: str) -> None:
        """Show the progress of an epoch."""

    def line(self, text: str) -> None:
        """Write a permanent line."""

    def close(self) -> None:
        """Restore the terminal."""


class _Lines:
    def __init__(self, file: TextIO, steps: int) -> None:
        self.file = file
        self.steps = steps

    def begin(self, title: str, step: int) -> None:
        return None

    def step(self, title: str, step: int, text: str) -> None:
        self.line(f"{title}  step {step}/{self.steps}  {text}")

    def line(self, text: str) -> None:
        self.file.write(text + "\n")
        self.file.flush()

    def close(self) -> None:
        return None


class _Bar:
    def __init__(self, file: TextIO, steps: int) -> None:
        from rich.console import Console  # imported only for terminals
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=file),
            auto_refresh=False,  # no additional thread
            transient=True,
        )
        self.task = self.progress.add_task("", total=steps, text="")
        self.progress.start()

    def begin(self, title: str, step: int) -> None:
        self.progress.reset(self.task, description=title, completed=step, text="")

    def step(self, title: str, step: int, text: str) -> None:
        self.progress.update(self.task, description=title, completed=step, text=text, refresh=True)

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()
