"""The connection of a rank to the process beside the ranks of its host (`pydtnn.comm.watchdog`)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from pydtnn.comm import watchdog
from pydtnn.comm.activity import CurrentActivity
from pydtnn.comm.last_step import Last, LastStep
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.stacks import OWN, stacks

DEFAULT_TIMEOUT = 300.0
"""Longest duration of a wait for other ranks or for a batch, in s."""


def supervise_alone() -> Supervision:
    """Return the supervision of a rank without others, in memory of its own."""
    slot = Slot(memoryview(bytearray(SLOT)))
    slot.clear(0, DEFAULT_TIMEOUT)
    return Supervision(slot, alone=True)


class Supervision:
    """What other processes learn about this rank, and what they ask of it.

    Parameters
    ----------
    slot : Slot
        Shared with the process beside the ranks.
    alone : bool
        Whether there is no other rank.

    Attributes
    ----------
    activity : CurrentActivity
        The observer that stores what this rank is doing.
    last_step : LastStep
    """

    def __init__(self, slot: Slot, *, alone: bool = False) -> None:
        self.slot = slot
        self.activity = CurrentActivity(slot)
        self.last_step = LastStep(None if alone else self._request)
        self._connection: socket.socket | None = None

    def connect(
        self,
        connection: socket.socket,
        end: Callable[[int], None],
        end_by_signal: Callable[[int], None],
    ) -> None:
        """Answer the process's messages from now on, in a thread.

        Parameters
        ----------
        connection : socket
        end : callable
            Ends all ranks with an exit status.
        end_by_signal : callable
            Ends all ranks at once because of a signal.
        """
        self._connection, self._end, self._end_by_signal = connection, end, end_by_signal
        threading.Thread(target=self._listen, daemon=True, name=f"{OWN}-process").start()

    def limit(self, seconds: float) -> None:
        """Set the longest duration of a wait for other ranks or for a batch, in s; 0: no limit."""
        self.slot.limit(seconds)

    def request_table(self) -> None:
        """Have the table of ranks printed; without a process, the stacks of this rank."""
        if not self._say("table"):
            os.write(2, f"stack of rank {self.slot.rank}:\n{stacks()}".encode())

    def leave(self) -> None:
        """Unregister this rank, so that its end is expected."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the process may have been killed
                self._connection.sendall(watchdog.LEAVING)
            self._connection = None

    def _request(self, signal: int) -> bool:
        return self._say(f"signal {signal}")

    def _say(self, line: str) -> bool:
        """Send a line to the process; return whether that is possible."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(f"{line}\n".encode())
                return True
        return False

    def _listen(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError), self._connection.makefile("r") as lines:
            for line in lines:
                what, *numbers = line.lstrip(watchdog.READY.decode()).split()
                self._obey(what, [int(number) for number in numbers])
        self.last_step.abandon()  # the process has ended, as a rank has

    def _obey(self, what: str, numbers: list[int]) -> None:
        if what == "stacks":
            self.slot.show(numbers[0], stacks())
        elif what == "end":
            self._end(numbers[0])
        elif what == "freeze":
            self._say(f"begun {self.last_step.hold()}")
        elif what == "last":
            last = Last(*numbers)
            self.last_step.decide(last)
            if last.step < 0 and last.rank == self.slot.rank:
                self._end_by_signal(last.signal)
