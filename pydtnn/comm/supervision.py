"""The connection of a rank to the monitor process of its host (`pydtnn.comm.monitor`).

A rank writes its current activity into shared memory (`CurrentActivity`), and agrees with the
others on the last step if a signal ends the run (`LastStep`). If the process is lost, because it
was killed or is stopped, each rank watches its own waits (`Supervision`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal as signals
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import thread as _pool
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.monitor import slots as at
from pydtnn.comm.monitor.flight import write_flight
from pydtnn.comm.monitor.links import MessageSocket
from pydtnn.comm.monitor.monitor import FINISH_TIMEOUT_S, FLIGHT_TIMEOUT_S, TIMEOUT_STATUS
from pydtnn.comm.monitor.processes import condition_of
from pydtnn.comm.monitor.ranks import is_first
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.monitor.state import LEFT, RunState, WatchedRun
from pydtnn.comm.monitor.table import INTERVAL_S, RankRow, Watched, sentence, table
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

MAX_SILENCE_S = {"has ended": 2.0, "stopped": 4.0, "": 30.0}
"""Seconds without a sign of the process after which it is lost: if it has ended (it also ends when
a rank has failed, and then the run does), if the system says why it does not run, and if not."""


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
        See `pydtnn.comm.monitor.ranks.is_first`.
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
    finishes : bool
        Whether ranks have something to write before they are ended.
    exited : dict of int to dict of str to int
        Ranks that have exited, and their collective calls by group.
    absent : callable
        Called with the seconds since the last call; returns why a wait cannot complete, or nothing.
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
        self._slots, self._watched = slots, Watched(slots, host)
        self._connection, self._file, self._length = connection, file, len(slots) * SLOT
        self.finishes = False
        # Without a connection, as is usual where the process cannot be started: no warning.
        state = RunState.RUNNING if connection is None else RunState.WATCHED
        self._run = WatchedRun([self.slot.rank], state)
        self.exited: dict[int, dict[str, int]] = {}
        self.absent: Callable[[float], str] = lambda passed: ""
        self._silent, self._beats = 0.0, -1
        self._finishing: list[Callable[[], str]] = []
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
        if not self._alone:
            threading.Thread(target=self._listen, daemon=True, name=f"{WATCHER}-process").start()

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
        if self._run.state is RunState.RUNNING or not self._send("table"):
            write_error(f"stack of rank {self.slot.rank}:\n{stacks()}")
            self._write_flight("on request")

    def leave(self) -> None:
        """Unregister this rank, so that its end is expected."""
        self._run.end_of(self.slot.rank, LEFT)
        if self._connection is not None:
            self._connection.send("left")
            self._connection = None

    def exit(self, calls: Mapping[str, int]) -> None:
        """Have the other ranks know that the program of this one has ended, after these calls."""
        if self._connection is not None:
            self._connection.send("exited", self.slot.rank, calls)

    # -- what is written before the end -----------------------------------------------------------

    @contextlib.contextmanager
    def finishing(self, write: Callable[[], str]) -> Iterator[None]:
        """Context in which `write` is called before the run is ended, on every rank that can run.

        Parameters
        ----------
        write : callable
            Called in another thread; returns what is to be reported, a line or nothing.
        """
        self._finishing.append(write)
        self.finishes = True
        try:
            yield
            self.finishes = False  # unlike after an error, which may end the other ranks
        finally:
            self._finishing = [one for one in self._finishing if one != write]

    def finish(self) -> str:
        """Call what `finishing` was given, once; return the lines to be reported."""
        writes, self._finishing = self._finishing, []
        return "".join(write() for write in writes)

    def finish_all(self) -> None:
        """Have all ranks finish before this one ends them; returns when they have.

        Their flight records are written, too.
        """
        if not self.finishes:
            self.record("an error", LAST_RECORD_S)
        else:
            self._have("finish", FINISH_TIMEOUT_S)

    def _have(self, line: str, seconds: float) -> bool:
        """Have the process do something for all ranks; return whether it has done it in time."""
        end = time.monotonic() + seconds
        if not self._answers() or not self._send(line):
            return False
        while not self._finished.wait(POLL_S):
            if not self._answers() or time.monotonic() > end:
                return False
        self._finished.clear()
        return True

    def _answers(self) -> bool:
        """Return whether the process can answer now: it may be stopped, which is noticed later."""
        unwatched = self._run.state is RunState.RUNNING
        return not unwatched and not condition_of(self.slot.words[at.MONITOR]).frozen

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
        if self.folder and not self._have("flight", seconds):
            self._write_flight(why)

    def _write_flight(self, why: str) -> None:
        """Store the flight record of this rank alone."""
        if self.folder:
            row = self._watched.look(time.monotonic())[self._place]
            with contextlib.suppress(OSError):  # another error is being reported
                write_flight(self.slot, row, self._size, why)

    # -- messages ---------------------------------------------------------------------------------

    def _request(self, signal: int) -> bool:
        return self._send("signal", signal)

    def _send(self, name: str, number: int = 0) -> bool:
        """Send a message to the process; return whether that is possible."""
        return self._connection is not None and self._connection.send(name, self.slot.rank, number)

    def _listen(self) -> None:
        connection, poll = self._connection, select.poll()
        if connection is not None:
            poll.register(connection, select.POLLIN)
        before = time.monotonic()
        while self._run.state is not RunState.ENDED:
            if connection is None:
                time.sleep(INTERVAL_S)
            elif poll.poll(1000 * INTERVAL_S):
                for name, facts in connection.receive():
                    self._obey(name, facts)
                if connection.closed:
                    connection = None
                    self.last_step.abandon()  # the process has ended, as a rank has
            now = time.monotonic()
            if now > before + INTERVAL_S / 2:
                # No time passes while this process is stopped, as with the whole job.
                self._watch(min(now - before, 2 * INTERVAL_S), ended=connection is None)
                before = now

    def _obey(self, name: str, facts: list[Any]) -> None:
        if name == "answer":
            what, request = facts
            self.slot.show(request, stacks() if what == "stacks" else self.finish())
        elif name == "finished":
            self._finished.set()
        elif name == "exited":
            self.exited[facts[0]] = facts[1]
        elif name == "end":
            self._run.on("end")
            self._end(facts[0], "")
        elif name == "freeze":
            self._send("begun", self.last_step.hold())
        elif name == "last":
            last = Last(*facts)
            self.last_step.decide(last)
            if last.step < 0 and last.rank == self.slot.rank:
                self._end_by_signal(last.signal)

    # -- the loss of the process ------------------------------------------------------------------

    def _watch(self, passed: float, *, ended: bool) -> None:
        """Notice the loss of the process, and waits that cannot end or have passed a deadline."""
        beats = self.slot.words[at.BEATS]
        self._silent = 0.0 if beats != self._beats and not ended else self._silent + passed
        self._beats = beats
        if self._run.ends:
            return
        reason = self.absent(passed)
        if reason and self._run.on("absent"):
            self._end(1, f"rank {self.slot.rank}: {reason}")
        if self._silent >= min(MAX_SILENCE_S.values()):
            why = "has ended" if ended else condition_of(self.slot.words[at.MONITOR]).why
            patience = MAX_SILENCE_S.get(why, MAX_SILENCE_S["stopped"])
            if self._silent >= patience and self._run.on("silent"):
                self._lose(why or "does not answer")
        if self._run.state is RunState.RUNNING:
            rows = self._watched.look(time.monotonic())
            own = [row for row in rows if row.rank == self.slot.rank]
            if own[0].expired and not any(row.unlimited for row in rows) and self._run.on("late"):
                self._expire(rows)

    def _lose(self, why: str) -> None:
        self.last_step.abandon()
        if self._place in self._watched.running()[:1]:  # the others would say the same
            verb = "" if why.startswith(("has", "does")) else "is "
            write_error(
                f"warning: the monitor process of {self._host} {verb}{why}: from now on each "
                "rank ends the run itself if it waits longer than --timeout, and a signal ends it "
                "at once, without a checkpoint\n"
            )

    def _expire(self, rows: Sequence[RankRow]) -> None:
        """End all ranks, as the process would."""
        timeout = self.slot.read().timeout
        begin = f"no progress for {timeout:g} s (--timeout): {sentence(rows)}\n{table(rows)}"
        more = f"stack of rank {self.slot.rank}:\n{stacks()}{self.finish()}"
        self._write_flight("a wait has passed its deadline")
        self._end(TIMEOUT_STATUS, f"{begin}{more}".rstrip("\n"))
