"""The time in which the processor of a rank copies the bytes of messages between hosts."""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 1 << 16
"""Bytes of a message that are copied after the last of them has arrived."""


@dataclass
class Copies:
    """Copying of a rank, part of which takes place while the rank waits.

    Attributes
    ----------
    pending : int
        Messages that are not complete.
    waited : float
        Time in s for which the rank has waited since there are any, and has not yet used to copy.
    """

    pending: int = 0
    waited: float = 0.0

    def post(self) -> None:
        """Count a message."""
        self.pending += 1

    def wait(self, seconds: float) -> None:
        """Note that the rank has waited."""
        if self.pending:
            self.waited += seconds

    def complete(self, seconds: float, last: float) -> float:
        """Return for how long a rank still copies when one of its messages is complete.

        Parameters
        ----------
        seconds : float
            Time to copy the message.
        last : float
            Time to copy its last piece.
        """
        hidden = min(self.waited, seconds - last)
        self.pending -= 1
        self.waited = self.waited - hidden if self.pending else 0.0
        return seconds - hidden
