"""Display of progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO, cast

import numpy as np

from pydtnn.training.callback import Callback, Throughput, Training
from pydtnn.training.checks import describe_complete
from pydtnn.utils import clock
from pydtnn.utils.launcher import launched
from pydtnn.utils.names import unknown
from pydtnn.utils.terminal import Lasting, width_of
from pydtnn.utils.units import align
from pydtnn.utils.validate import check_float

MAX_BAR_WIDTH, MIN_BAR_WIDTH = 20, 6
"""Limits of the bar's width, in columns."""

REFRESH_S = 0.1
"""Seconds between two updates of a bar."""

STYLES = ("auto", "bar", "plain")


class LinePiece(NamedTuple):
    """A part of a line, such as "loss 0.5123".

    Attributes
    ----------
    importance : int
        If a line is too long, the pieces with the highest numbers are omitted.
    text : str
    """

    importance: int
    text: str


def fit_pieces(pieces: Sequence[LinePiece], width: int) -> str:
    """Join the most important pieces that fit into a number of columns, in their order.

    >>> fit_pieces([LinePiece(0, "epoch 1"), LinePiece(2, "lr 0.1"), LinePiece(1, "loss 0.5")], 18)
    'epoch 1  loss 0.5'
    """
    chosen: list[LinePiece] = []
    left = width + 2
    for piece in sorted(pieces, key=lambda piece: piece.importance):
        if len(piece.text) + 2 <= left:
            chosen.append(piece)
            left -= len(piece.text) + 2
    return "  ".join(piece.text for piece in pieces if piece in chosen)


class Lines:
    """Plain lines.

    Parameters
    ----------
    file : text stream
    steps : int
        Steps per epoch.
    """

    def __init__(self, file: TextIO, steps: int) -> None:
        self.file = file
        self.steps = steps

    def begin(self, title: str, step: int) -> None:
        """Write nothing."""

    def step(self, title: str, step: int, pieces: Sequence[LinePiece]) -> None:
        """Write a line."""
        self.line([LinePiece(0, title), LinePiece(0, f"step {step}/{self.steps}"), *pieces])

    def line(self, pieces: Sequence[LinePiece]) -> None:
        """Write a line with all pieces."""
        self.file.write("  ".join(piece.text for piece in pieces) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Keep the file open: it belongs to the caller."""


class TerminalBar:
    """A bar in one line of a terminal, which is never wrapped.

    Parameters
    ----------
    file : text stream
    steps : int
        Steps per epoch.
    """

    def __init__(self, file: TextIO, steps: int) -> None:
        from rich.console import Console  # imported only for terminals
        from rich.progress import BarColumn, Progress, TextColumn

        self.file = file
        self.steps = steps
        self.bar = BarColumn(bar_width=MAX_BAR_WIDTH)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            self.bar,
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=file, force_terminal=True, width=width_of(file)),
            auto_refresh=False,  # no additional thread
            transient=True,
        )
        self.task = self.progress.add_task("", total=steps, text="")
        self.progress.start()
        # MPI terminates a process without `close`; the terminal would remain without a cursor.
        self.progress.console.show_cursor(True)

    def begin(self, title: str, step: int) -> None:
        """Show an epoch without values."""
        self.progress.reset(self.task, description=title, completed=step, text="")

    def step(self, title: str, step: int, pieces: Sequence[LinePiece]) -> None:
        """Show the pieces for which there is room besides the bar."""
        width = self._measure()
        count = LinePiece(-1, f"{step}/{self.steps}")
        text = fit_pieces([count, *pieces], width - len(title) - MIN_BAR_WIDTH - 2)
        self.bar.bar_width = min(width - len(title) - len(text) - 2, MAX_BAR_WIDTH)
        self.progress.update(self.task, description=title, completed=step, text=text, refresh=True)

    def line(self, pieces: Sequence[LinePiece]) -> None:
        """Write the pieces that fit into one line; a single long piece takes several."""
        text = fit_pieces(pieces, self._measure()) or pieces[0].text
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self.progress.stop()

    def _measure(self) -> int:
        """Return the width of the terminal, which may have changed."""
        self.progress.console.width = width_of(self.file)
        return self.progress.console.width


class ProgressBar(Callback):
    """Show step, loss, metrics, learning rate and samples/s on rank 0; tokens/s of sequences.

    On a terminal it shows a progress bar, and a line for each completed epoch; otherwise plain
    lines, one for each epoch and one every few seconds within it. A line on a terminal contains
    what fits into its width. Losses and metrics are means over the epoch so far; "last loss" is
    that of the last step. With schemes whose ranks train independently, those of the last steps of
    an epoch in progress are of the samples of rank 0 (`Trainer.own_steps`), which the line says.

    Under mpirun, ranks write into pipes: style "bar" shows a bar in its terminal.

    Parameters
    ----------
    file : text stream, optional
        Output stream; by default ``sys.stdout``.
    interval : float
        Seconds between two lines within an epoch without a terminal.
    style : {"auto", "bar", "plain"}
        "bar" shows a bar also where no terminal is found, "plain" shows lines on a terminal.
    """

    reads_gradients = False

    def __init__(
        self, file: TextIO | None = None, *, interval: float = 10.0, style: str = "auto"
    ) -> None:
        if style not in STYLES:
            raise ValueError(f"ProgressBar: {unknown('style', style, STYLES)}")
        self.file = file
        self.interval = check_float("ProgressBar", "interval", interval, at_least=0)
        self.style = style
        self._display: TerminalBar | Lines | None = None
        self._epochs = self._steps = 0
        self._pause, self._first = 0.0, 0  # steps before the epoch
        self._throughput = Throughput()
        self._begin = self._now = self._shown = 0.0

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Choose between a bar and lines."""
        self.close()
        file = self.file or sys.stdout
        if trainer.comm.rank > 0 or file is None:  # a daemon has no standard output
            return
        self._display = self._choose(cast(TextIO, Lasting(file)), steps)
        self._epochs, self._steps = epochs, steps
        self._pause = REFRESH_S if isinstance(self._display, TerminalBar) else self.interval
        if trainer.epoch >= epochs > 0:
            self._display.line([LinePiece(0, describe_complete(trainer.epoch, epochs))])

    def _choose(self, file: TextIO, steps: int) -> TerminalBar | Lines:
        found = self.style == "auto" and os.environ.get("TERM") != "dumb" and file.isatty()
        found = found and not launched()  # Open MPI gives ranks a terminal of its own
        return TerminalBar(file, steps) if found or self.style == "bar" else Lines(file, steps)

    def on_epoch_start(self, trainer: Training) -> None:
        """Start the timer."""
        if self._display:
            self._display.begin(self._title(trainer.epoch + 1), trainer.step)
        self._first = trainer.step
        self._throughput.begin(trainer)
        self._begin = self._now = self._shown = clock.now()

    def on_step_end(self, trainer: Training) -> None:
        """Show the means so far, if the interval has passed."""
        self._now = clock.now()
        self._throughput.step(trainer)
        if self._display and self._now - self._shown >= self._pause:
            self._shown = self._now
            pieces = [LinePiece(4, self._remaining(trainer.step)), *_values(trainer.logs)]
            pieces += [LinePiece(9, f"last loss {value:.4f}") for value in trainer.losses[-1:]]
            if trainer.own_steps:
                pieces.append(LinePiece(10, f"last {trainer.own_steps} steps of rank 0 only"))
            pieces += _values({"lr": trainer.optimizer.lr_now})
            pieces += self._rates(trainer)
            self._display.step(self._title(trainer.epoch + 1), trainer.step, pieces)

    def on_epoch_end(self, trainer: Training) -> None:
        """Show the epoch's results."""
        if self._display:
            title = LinePiece(0, self._title(trainer.epoch))
            seconds = LinePiece(4, f"{self._now - self._begin:.1f} s")
            self._display.line([title, *_values(trainer.logs), *self._rates(trainer), seconds])

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

    def _rates(self, trainer: Training) -> list[LinePiece]:
        rates = self._throughput.rates(trainer)
        return [LinePiece(6, f"{rate:.0f} {what}/s") for what, rate in rates.items()]

    def _remaining(self, step: int) -> str:
        """Return the time until the end of the epoch at the speed so far, such as "1:05 left"."""
        each = (self._now - self._begin) / (step - self._first)
        minutes, seconds = divmod(round(each * (self._steps - step)), 60)
        hours, minutes = divmod(minutes, 60)
        shown = f"{hours}:{minutes:02}" if hours else f"{minutes}"
        return f"{shown}:{seconds:02} left"


def create_progress(progress: str | bool) -> list[Callback]:
    """Return the callback that shows the progress of a trainer: a `ProgressBar`, or nothing.

    Parameters
    ----------
    progress : {"auto", "bar", "plain", "none"} or bool
        Style of the progress bar; True is "auto" and False is "none".

    Raises
    ------
    ValueError
        If `progress` is none of these.
    """
    if isinstance(progress, bool):
        progress = "auto" if progress else "none"
    if progress == "none":
        return []
    if progress not in STYLES:
        message = unknown("value of progress", str(progress), [*STYLES, "none"])
        raise ValueError(f"Trainer: {message}")
    return [ProgressBar(style=progress)]


def format_logs(logs: Mapping[str, float]) -> str:
    """Return the values of a log in one line.

    >>> format_logs({"loss": 0.51234, "lr": 0.1})
    'loss 0.5123  lr 0.1'
    """
    return "  ".join(piece.text for piece in _values(logs))


def format_arrays(logs: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
    """Return the lines of a table for each array of a log, such as a confusion matrix.

    Parameters
    ----------
    logs : mapping of str to float or array
    names : sequence of str, optional
        Names of the classes; by default their numbers.

    >>> format_arrays({"loss": 0.5, "confusion": np.array([[7, 0], [2, 11]])}, ["cat", "dog"])
    ['confusion', '     cat  dog', 'cat    7    0', 'dog    2   11']
    """
    lines = []
    for name, value in logs.items():
        if not np.ndim(value):
            continue
        labels = names if names is not None and len(names) == len(value) else range(len(value))
        rows = [["", *map(str, labels)]] if np.ndim(value) == 2 else []
        for label, row in zip(labels, value, strict=True):
            numbers = [f"{x:d}" if isinstance(x, np.integer) else f"{x:.4f}" for x in np.ravel(row)]
            rows.append([str(label), *numbers])
        lines += [name, *align(rows, 1)]
    return lines


def _values(logs: Mapping[str, float]) -> list[LinePiece]:
    """Return the values of a log; the first metric and loss of the validation are kept longest."""
    metric = next((name for name in logs if name != "loss"), "")
    ranks = {f"val_{metric}": 1, "val_loss": 2, "loss": 3, metric: 5, "lr": 8}
    return [
        LinePiece(
            ranks.get(name, 7),
            f"{name} {value:.3g}" if name == "lr" else f"{name} {value:.4f}",
        )
        for name, value in logs.items()
        if not np.ndim(value)
    ]
