"""The connection of a rank to the monitor process of its host (`pydtnn.comm.monitor`).

A rank writes its current activity into shared memory (`CurrentActivity`), and agrees with the
others on the last step if a signal ends the run (`LastStep`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal as signals
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import thread as _pool
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.monitor import slots as at
from pydtnn.comm.monitor.links import FLIGHT_TIMEOUT_S, INTERVAL_S, MessageSocket, is_first
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.utils._recorder import Course, Lane, Shared
from pydtnn.utils.errors import write_error
from pydtnn.utils.observer import Observer

MAX_CALLS_SHOWN = 8
"""Innermost calls that are shown of each thread."""

WATCHER = "pydtnn-watch"
"""First part of the names of threads that only watch others; they are not shown."""


def stacks() -> str:
    """Return a line for each thread, with its innermost calls, the last one innermost."""
    frames = sys._current_frames()
    shown = (thread for thread in threading.enumerate() if not thread.name.startswith(WATCHER))
    calls = ((thread.name, _calls(frames.get(thread.ident or 0))) for thread in shown)
    return "".join(f"  {name}: {text}\n" for name, text in calls if text)


def _calls(frame: FrameType | None) -> str:
    """Return the innermost calls, without those that start threads or wait for others.

    It is empty for threads without work, and never for the main thread.
    """
    calls: list[str] = []
    while frame is not None and len(calls) < MAX_CALLS_SHOWN:
        code = frame.f_code
        if code.co_filename not in (threading.__file__, _pool.__file__):
            calls.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(calls))


LAST_STEP_TIMEOUT_S = 20.0
"""Seconds in which the step in progress must be complete; then the run ends without it."""

SAME_SIGNAL_S = 0.5
"""Seconds in which a second signal is the same one, sent by the terminal and by a shell."""

FORWARDED_SIGNAL_S = 2.0
"""The same with several ranks: batch systems send a signal to the ranks and to their launcher,
which forwards it, on a busy machine more than half a second later."""


class Last(NamedTuple):
    """The last step: its number among those begun, and the signal, with the rank that it reached.

    Attributes
    ----------
    step : int
        -1 if a rank is not in training, so that the run ends at once.
    signal, rank : int
    """

    step: int
    signal: int
    rank: int


LAST_RECORD_S = 2.0
"""Seconds in which the flight records of a run that ends are stored."""

POLL_S = 0.05
"""Seconds between two looks at the monitor process while it writes what ranks have recorded."""


class LastStep:
    """Counts the steps that this rank begins, and holds it until all ranks know the last one.

    Parameters
    ----------
    send_request : callable, optional
        Requests the end of the run, with the signal; returns whether that is possible. By default
        there is no other rank.

    Attributes
    ----------
    reached : bool
        Whether the last step is complete on this rank.
    twice : float
        Seconds in which a second signal is the same one.
    grace : float
        Seconds in which the step in progress must be complete.
    ends_on_usr1 : bool
        Whether SIGUSR1 asks for the end of the run, too, as before a job is preempted.
    """

    def __init__(self, send_request: Callable[[int], bool] | None = None) -> None:
        self._send_request = send_request
        self._changed = threading.Condition()
        self._active = self._held = self._abandoned = False
        self._begun = 0
        self._last: Last | None = None
        self._requested_at: float | None = None
        self.reached = False
        self.twice = SAME_SIGNAL_S if send_request is None else FORWARDED_SIGNAL_S
        self.grace, self.ends_on_usr1 = LAST_STEP_TIMEOUT_S, False

    def start(self) -> None:
        """Allow the run to end after a step from now on; called when training starts."""
        with self._changed:
            self._active = True
            self._last = self._requested_at = None
            self.reached = False

    def stop(self) -> None:
        """The run ends at once from now on; called when training has ended."""
        with self._changed:
            self._active = False

    def passed(self) -> Last | None:
        """Called before each step and after the last one: return the end if it has been reached.

        Waits while the ranks agree on it.
        """
        with self._changed:
            while self._held:
                self._changed.wait()
            if self._last is not None and 0 <= self._last.step <= self._begun:
                self.reached = True
                self._active = False
                return self._last
            self._begun += 1
            return None

    def request(self, signal: int) -> bool:
        """Ask for the end after the step in progress; return whether that is possible now.

        A later signal ends the run at once. If the end has been decided because of another rank,
        this one's first signal is the same, however late it arrives: launchers and batch systems
        send it to each.
        """
        with self._changed:
            now = time.monotonic()
            if self._last is not None and self._last.step >= 0 and self._requested_at is None:
                self._requested_at = now
                return True
            if (
                not self._active
                or self._abandoned
                or (self._requested_at is not None and now > self._requested_at + self.twice)
            ):
                return False
            self._requested_at = self._requested_at or now
            if self._send_request is None:
                self._last = self._last or Last(self._begun, signal, 0)
        return self._send_request is None or self._send_request(signal)

    def preempted(self) -> bool:
        """Request the end because of SIGUSR1, if that is its meaning; return whether it is new."""
        return self.ends_on_usr1 and self._requested_at is None and self.request(signals.SIGUSR1)

    def overdue(self) -> bool:
        """Return whether the step that `request` waits for has not been completed in time."""
        since = self._requested_at
        if since is None or self.reached:
            return False
        return self._abandoned or time.monotonic() > since + self.grace

    def hold(self) -> int:
        """Begin no further step; return the number of those begun, or -1 outside of training."""
        with self._changed:
            self._held = self._active and not self._abandoned
            return self._begun if self._held else -1

    def abandon(self) -> None:
        """Give up agreement, as a rank has failed: a signal ends the run at once."""
        with self._changed:
            self._held, self._abandoned = False, True
            self._changed.notify_all()

    def decide(self, last: Last) -> None:
        """End after this step, unless this rank has gone on without agreement."""
        with self._changed:
            self._held = False
            if not self._abandoned:
                self._last = last
            self._changed.notify_all()


class ThreadActivity(Lane, Observer):
    """Stores the activities of one of the loader's threads."""


class CurrentActivity(Lane, Observer):
    """Stores the activities of this rank in its slot: those in progress, and the newest records.

    It is compiled, and makes no system call.

    Parameters
    ----------
    slot : Slot
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._words = slot.words
        ring, words = np.frombuffer(slot.ring, np.uint8), np.frombuffer(slot.words, np.int64)
        self._course = Course(0, -1, Shared(ring, words, slot))
        super().__init__(self._course, 0, at.MOVES, at.DEPTH, at.STACK, at.DEEPEST)
        self._lanes: dict[str, Observer] = {}

    def lane(self, name: str) -> Observer:
        """Return the observer of another thread; without effect if there is no room for it."""
        if name not in self._lanes:
            place = len(self._lanes)
            if place == at.MOST_LANES:
                return Observer()
            first = at.LANES + at.LANE * place
            self._lanes[name] = ThreadActivity(
                self._course, place + 1, first + 1, first + 2, first + 3, at.LANE - 3
            )
            self._words[first] = self.slot.number(name)
        return self._lanes[name]

    def step(self, epoch: int, step: int) -> None:
        super().step(epoch, step)
        words = self._words
        words[at.EPOCH], words[at.STEP] = epoch, step
        words[at.MOVES] += 1

    def call(self, name: str, group: str, number: int, peer: int) -> None:
        """Called when the main thread begins to wait in a call of a communicator.

        Parameters
        ----------
        name, group : str
        number : int
            Number of collective calls in the group, with this one; 0 for messages.
        peer : int
            The other rank of a message, among all ranks; -1 for collective calls.
        """
        words, slot = self._words, self.slot
        words[at.CALL], words[at.GROUP] = slot.number(name), slot.number(group)
        words[at.NUMBER], words[at.PEER] = number, peer
        words[at.CALLING] = 1
        words[at.MOVES] += 1

    def called(self) -> None:
        """Called when the wait ends."""
        self._words[at.CALLING] = 0
        self._words[at.MOVES] += 1


DEFAULT_TIMEOUT_S = 300.0
"""Longest duration of a wait for other ranks or for a batch, in s."""

LOST_S = 2.0
"""Seconds from the end of the process to the warning: it also ends when a rank has failed, and then
the run does."""


def supervise_alone() -> Supervision:
    """Return the supervision of a rank without others, in memory of its own."""
    slot = Slot(memoryview(bytearray(SLOT)))
    slot.clear(0, DEFAULT_TIMEOUT_S)
    return Supervision([slot], alone=True)


class Supervision:
    """What other processes learn about this rank, and what they ask of it.

    Parameters
    ----------
    slots : sequence of Slot
        Of the ranks of this host, shared with the monitor process.
    place : int
        Number of this rank's slot.
    host : str
        Name of the host.
    connection : MessageSocket, optional
        None if the process could not be started.
    file : int, optional
        See `pydtnn.comm.monitor.links.is_first`.
    alone : bool
        Whether there is no other rank.
    size : int
        Number of ranks.

    Attributes
    ----------
    slot : Slot
        Of this rank.
    activity : CurrentActivity
        The observer that stores what this rank is doing.
    last_step : LastStep
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        place: int = 0,
        host: str = "",
        connection: MessageSocket | None = None,
        file: int | None = None,
        *,
        alone: bool = False,
        size: int = 1,
    ) -> None:
        self.slot = slots[place]
        self.activity = CurrentActivity(self.slot)
        self.last_step = LastStep(None if alone else self._request)
        self._place, self._host, self._alone, self._size = place, host, alone, size
        self._slots, self._connection = slots, connection
        self._file, self._length = file, len(slots) * SLOT
        self._finished = threading.Event()

    def connect(
        self, end: Callable[[int, str], None], end_by_signal: Callable[[int], None]
    ) -> None:
        """Answer the process's messages from now on, in a thread, and notice if it is lost.

        Parameters
        ----------
        end : callable
            Ends all ranks with an exit status, and reports the reason unless that is empty.
        end_by_signal : callable
            Ends all ranks at once because of a signal.
        """
        self._end, self._end_by_signal = end, end_by_signal
        if self._connection is not None:
            threading.Thread(target=self._listen, daemon=True, name=f"{WATCHER}-process").start()
        elif not self._alone:
            self._warn("cannot be started")

    def claim_report(self) -> bool:
        """Return whether this is the first process of the host to report the end of the run.

        Without a file, every rank reports.
        """
        return self._file is None or is_first(self._file, self._length)

    def limit(self, seconds: float) -> None:
        """Set the longest duration of a wait for other ranks or for a batch, in s; 0: no limit."""
        self.slot.limit(seconds)

    def survive(self, wanted: bool) -> None:
        """Set whether this rank continues without ranks that fail, instead of ending with them."""
        self.slot.words[at.SURVIVES] = wanted

    def failed_at(self, rank: int) -> float | None:
        """Return when a rank of this host has failed, in s of the monotonic clock, if it has."""
        failed = [slot.words[at.ENDED] for slot in self._slots if slot.rank == rank]
        return failed[0] / 1e9 if failed and failed[0] else None

    def prepare_for_preemption(self, grace: float) -> None:
        """Let SIGUSR1 end the run as SIGTERM does, after a step that may take `grace` seconds."""
        self.last_step.grace, self.last_step.ends_on_usr1 = grace, True

    def request_table(self) -> None:
        """Have the table of ranks printed; without a process, the stacks of this rank."""
        if not self._send("table"):
            write_error(f"stack of rank {self.slot.rank}:\n{stacks()}")
            self._write_flight("on request")

    def leave(self) -> None:
        """Unregister this rank, so that its end is expected."""
        if self._connection is not None:
            self._connection.send("left")
            self._connection = None

    def exit(self, calls: Mapping[str, int]) -> None:
        """Report that the program of this rank has ended, after these calls."""
        if self._connection is not None:
            self._connection.send("exited", self.slot.rank, calls)

    # -- the flight record ------------------------------------------------------------------------

    @property
    def folder(self) -> str:
        """Folder in which the newest records of each rank are stored when the run fails.

        The records of `activity` are stored if the run is ended because of an error, a failure of a
        rank or a wait that has passed its deadline, and with the table on request; empty for none.
        """
        return self.slot.folder

    @folder.setter
    def folder(self, folder: str | os.PathLike[str]) -> None:
        self.slot.folder = os.path.abspath(folder) if folder else ""

    def record(self, why: str, seconds: float = 2 * FLIGHT_TIMEOUT_S) -> None:
        """Store the flight records of all ranks now; returns when they are, or after a time in s.

        Then that of this rank is stored.
        """
        end = time.monotonic() + seconds
        recorded = bool(self.folder) and self._send("flight")
        while recorded and not self._finished.wait(POLL_S):
            recorded = self._connected and time.monotonic() < end
        self._finished.clear()
        if not recorded:
            self._write_flight(why)

    def _write_flight(self, why: str) -> None:
        """Store the flight record of this rank alone."""
        if self.folder:
            from pydtnn.comm.monitor.flight import write_flight
            from pydtnn.comm.monitor.table import Watched

            row = Watched(self._slots, self._host).look(time.monotonic())[self._place]
            with contextlib.suppress(OSError):  # another error is being reported
                write_flight(self.slot, row, self._size, why)

    # -- messages ---------------------------------------------------------------------------------

    def _request(self, signal: int) -> bool:
        return self._send("signal", signal)

    def _send(self, name: str, number: int = 0) -> bool:
        """Send a message to the process; return whether that is possible."""
        return self._connection is not None and self._connection.send(name, self.slot.rank, number)

    @property
    def _connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def _listen(self) -> None:
        """Take the messages of the process, and notice its loss."""
        connection, poll = self._connection, select.poll()
        assert connection is not None
        poll.register(connection, select.POLLIN)
        while self._connected:
            if poll.poll(1000 * INTERVAL_S):
                for name, facts in connection.receive():
                    self._obey(name, facts)
        self.last_step.abandon()
        time.sleep(LOST_S)
        if self._connection is not None:  # this rank has not left
            self._warn("has ended")

    def _warn(self, why: str) -> None:
        if self._place == 0:  # the others would say the same
            write_error(
                f"warning: the monitor process of {self._host} {why}: waits have no deadline, and "
                "a signal ends the run at once, without a checkpoint\n"
            )

    def _obey(self, name: str, facts: list[Any]) -> None:
        if name == "answer":
            self.slot.show(facts[1], stacks())
        elif name == "finished":
            self._finished.set()
        elif name == "end":
            self._end(facts[0], "")
        elif name == "freeze":
            self._send("begun", self.last_step.hold())
        elif name == "last":
            last = Last(*facts)
            self.last_step.decide(last)
            if last.step < 0 and last.rank == self.slot.rank:
                self._end_by_signal(last.signal)
