"""Progress of a program: a bar on a terminal, or plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TextIO

from pydtnn.utils.terminal import width_of

WIDEST_BAR, NARROWEST_BAR = 20, 6
"""Limits of the bar's width, in columns."""


class Piece(NamedTuple):
    """A part of a line, such as "loss 0.5123".

    Attributes
    ----------
    importance : int
        If a line is too long, the pieces with the highest numbers are omitted.
    text : str
    """

    importance: int
    text: str


def fit_pieces(pieces: Sequence[Piece], width: int) -> str:
    """Join the most important pieces that fit into a number of columns, in their order.

    >>> fit_pieces([Piece(0, "epoch 1"), Piece(2, "lr 0.1"), Piece(1, "loss 0.5")], 18)
    'epoch 1  loss 0.5'
    """
    chosen: list[Piece] = []
    left = width + 2
    for piece in sorted(pieces, key=lambda piece: piece.importance):
        if len(piece.text) + 2 <= left:
            chosen.append(piece)
            left -= len(piece.text) + 2
    return "  ".join(piece.text for piece in pieces if piece in chosen)


class Display(Protocol):
    """Interface of a display."""

    def begin(self, title: str, step: int) -> None:
        """Start an epoch, of which some steps may be complete."""

    def step(self, title: str, step: int, pieces: Sequence[Piece]) -> None:
        """Show the progress of an epoch."""

    def line(self, pieces: Sequence[Piece]) -> None:
        """Write a permanent line."""

    def close(self) -> None:
        """Restore the terminal."""


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

    def step(self, title: str, step: int, pieces: Sequence[Piece]) -> None:
        """Write a line."""
        self.line([Piece(0, title), Piece(0, f"step {step}/{self.steps}"), *pieces])

    def line(self, pieces: Sequence[Piece]) -> None:
        """Write a line with all pieces."""
        self.file.write("  ".join(piece.text for piece in pieces) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Keep the file open: it belongs to the caller."""


class Bar:
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
        self.bar = BarColumn(bar_width=WIDEST_BAR)
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

    def step(self, title: str, step: int, pieces: Sequence[Piece]) -> None:
        """Show the pieces for which there is room besides the bar."""
        width = self._measure()
        count = Piece(-1, f"{step}/{self.steps}")
        text = fit_pieces([count, *pieces], width - len(title) - NARROWEST_BAR - 2)
        self.bar.bar_width = min(width - len(title) - len(text) - 2, WIDEST_BAR)
        self.progress.update(self.task, description=title, completed=step, text=text, refresh=True)

    def line(self, pieces: Sequence[Piece]) -> None:
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
