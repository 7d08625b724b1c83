"""The connection of a rank to the monitor process of its host (`pydtnn.comm.watchdog`).

If that process is lost, because it was killed or is stopped, each rank watches its own waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pydtnn.comm import watchdog
from pydtnn.comm.activity import CurrentActivity
from pydtnn.comm.last_step import Last, LastStep
from pydtnn.comm.monitor.monitor import FINISHING, STATUS
from pydtnn.comm.monitor.processes import condition_of
from pydtnn.comm.monitor.rows import INTERVAL, Row, Watched
from pydtnn.comm.monitor.slots import BEATS, MONITOR, SLOT, Slot
from pydtnn.comm.monitor.table import sentence, table
from pydtnn.comm.stacks import OWN, stacks

DEFAULT_TIMEOUT = 300.0
"""Longest duration of a wait for other ranks or for a batch, in s."""

SILENCE = {"has ended": 2.0, "stopped": 4.0, "": 30.0}
"""Seconds without a sign of the process after which it is lost: if it has ended (it also ends when
a rank has failed, and then the run does), if the system says why it does not run, and if not."""

NUMBERS = {"stacks": 1, "finish": 1, "finished": 0, "end": 1, "freeze": 0, "last": 3}
"""Messages of the process, and how many numbers follow."""


def supervise_alone() -> Supervision:
    """Return the supervision of a rank without others, in memory of its own."""
    slot = Slot(memoryview(bytearray(SLOT)))
    slot.clear(0, DEFAULT_TIMEOUT)
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
    alone : bool
        Whether there is no other rank.

    Attributes
    ----------
    slot : Slot
        Of this rank.
    activity : CurrentActivity
        The observer that stores what this rank is doing.
    last_step : LastStep
    finishes : bool
        Whether ranks have something to write before they are ended.
    """

    def __init__(
        self, slots: Sequence[Slot], place: int = 0, host: str = "", *, alone: bool = False
    ) -> None:
        self.slot = slots[place]
        self.activity = CurrentActivity(self.slot)
        self.last_step = LastStep(None if alone else self._request)
        self._place, self._host, self._alone = place, host, alone
        self._watched = Watched(slots, host)
        self._connection: socket.socket | None = None
        self.finishes = self._left = self._lost = self._ending = False
        self._silent, self._beats = 0.0, -1
        self._finishing: list[Callable[[], str]] = []
        self._finished = threading.Event()

    def connect(
        self,
        connection: socket.socket | None,
        end: Callable[[int, str], None],
        end_by_signal: Callable[[int], None],
    ) -> None:
        """Answer the process's messages from now on, in a thread, and notice if it is lost.

        Parameters
        ----------
        connection : socket or None
            None if the process could not be started.
        end : callable
            Ends all ranks with an exit status, and reports the reason unless that is empty.
        end_by_signal : callable
            Ends all ranks at once because of a signal.
        """
        self._connection, self._end, self._end_by_signal = connection, end, end_by_signal
        self._lost = connection is None  # as is usual where it cannot be started: no warning
        if not self._alone:
            threading.Thread(target=self._listen, daemon=True, name=f"{OWN}-process").start()

    def limit(self, seconds: float) -> None:
        """Set the longest duration of a wait for other ranks or for a batch, in s; 0: no limit."""
        self.slot.limit(seconds)

    def request_table(self) -> None:
        """Have the table of ranks printed; without a process, the stacks of this rank."""
        if self._lost or not self._say("table"):
            os.write(2, f"stack of rank {self.slot.rank}:\n{stacks()}".encode())

    def leave(self) -> None:
        """Unregister this rank, so that its end is expected."""
        self._left = True
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the process may have been killed
                self._connection.sendall(watchdog.LEAVING)
            self._connection = None

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
        """Have all ranks finish before this one ends them; returns when they have."""
        if self.finishes and not self._lost and self._say("finish"):
            self._finished.wait(FINISHING)

    # -- messages ---------------------------------------------------------------------------------

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
        connection, begun, poll = self._connection, b"", select.poll()
        if connection is not None:
            poll.register(connection, select.POLLIN)
        before = time.monotonic()
        while not self._left:
            if connection is None:
                time.sleep(INTERVAL)
            elif poll.poll(1000 * INTERVAL):
                data = b""
                with contextlib.suppress(OSError):
                    data = connection.recv(1 << 12)
                if not data:
                    connection = None
                    self.last_step.abandon()  # the process has ended, as a rank has
                *lines, begun = (begun + data.lstrip(watchdog.READY)).split(b"\n")
                for line in lines:
                    what, *words = line.decode(errors="replace").split() or [""]
                    with contextlib.suppress(ValueError):
                        numbers = [int(word) for word in words]
                        if len(numbers) == NUMBERS.get(what):
                            self._obey(what, numbers)
            now = time.monotonic()
            if now > before + INTERVAL / 2:
                # No time passes while this process is stopped, as with the whole job.
                self._watch(min(now - before, 2 * INTERVAL), ended=connection is None)
                before = now

    def _obey(self, what: str, numbers: list[int]) -> None:
        if what == "stacks":
            self.slot.show(numbers[0], stacks())
        elif what == "finish":
            self.slot.show(numbers[0], self.finish())
        elif what == "finished":
            self._finished.set()
        elif what == "end":
            self._ending = True
            self._end(numbers[0], "")
        elif what == "freeze":
            self._say(f"begun {self.last_step.hold()}")
        elif what == "last":
            last = Last(*numbers)
            self.last_step.decide(last)
            if last.step < 0 and last.rank == self.slot.rank:
                self._end_by_signal(last.signal)

    # -- the loss of the process ------------------------------------------------------------------

    def _watch(self, passed: float, *, ended: bool) -> None:
        """Notice the loss of the process; then look for a wait that has passed its deadline."""
        beats = self.slot.words[BEATS]
        self._silent = 0.0 if beats != self._beats and not ended else self._silent + passed
        self._beats = beats
        if self._left or self._ending or self._silent < min(SILENCE.values()):
            return
        why = "has ended" if ended else condition_of(self.slot.words[MONITOR]).why
        if not self._lost and self._silent >= SILENCE.get(why, SILENCE["stopped"]):
            self._lose(why or "does not answer")
        if self._lost:
            rows = self._watched.look(time.monotonic())
            if rows[self._place].expired and not any(row.unlimited for row in rows):
                self._expire(rows)

    def _lose(self, why: str) -> None:
        self._lost = True
        self.last_step.abandon()
        if self._place in self._watched.running()[:1]:  # the others would say the same
            verb = "" if why.startswith(("has", "does")) else "is "
            text = (
                f"warning: the monitor process of {self._host} {verb}{why}: from now on each "
                "rank ends the run itself if it waits longer than --timeout, and a signal ends it "
                "at once, without a checkpoint\n"
            )
            os.write(2, text.encode())

    def _expire(self, rows: Sequence[Row]) -> None:
        """End all ranks, as the process would."""
        self._ending = True
        timeout = self.slot.read().timeout
        begin = f"no progress for {timeout:g} s (--timeout): {sentence(rows)}\n{table(rows)}"
        more = f"stack of rank {self.slot.rank}:\n{stacks()}{self.finish()}"
        self._end(STATUS, f"{begin}{more}".rstrip("\n"))
