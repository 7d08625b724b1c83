"""The process beside the ranks of a host: deadlines, the table of ranks, and the last step."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydtnn.comm.monitor.last_step import LastStep
from pydtnn.comm.monitor.links import Link, Said, connect
from pydtnn.comm.monitor.rows import Row, Watched
from pydtnn.comm.monitor.slots import Slot
from pydtnn.comm.monitor.table import names, sentence, table

STATUS = 75
"""Exit status of a run in which a wait has passed its deadline (EX_TEMPFAIL of sysexits.h)."""

STACKS = 1.0
"""Seconds to wait for the Python stacks of the ranks of a host."""

ANSWER = 3.0
"""Seconds to wait for the rows of other hosts."""

FORWARDING = 0.3
"""Seconds for the launcher to forward the table, as the end of the ranks may overtake its pipes."""

ENDING = 2.0
"""Seconds in which a rank that can run ends after it was told to; then it is killed."""


@dataclass
class Facts:
    """What the process is told when it starts.

    Attributes
    ----------
    hosts : list of int
        Host of each rank, by the first rank on it.
    host : int
        This host.
    names : dict of str to str
        Names of the hosts, by number.
    addresses : list of str
        Of the first host.
    port : int
        Of the process on the first host; 0 if there is one host.
    token : str
        First message to it.
    """

    hosts: list[int]
    host: int
    names: dict[str, str]
    addresses: list[str] = field(default_factory=list)
    port: int = 0
    token: str = ""

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host."""
        return self.ranks_of(self.host)

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, other in enumerate(self.hosts) if other == host]


class Monitor:
    """Watches the slots of this host; on the first host it also reports for all.

    Parameters
    ----------
    facts : Facts
    slots : sequence of Slot
        Of the ranks of this host, in their order.
    claim : callable
        Called before ranks are ended: no other process reports the end of the run.
    listener : socket, optional
        Where the processes of the other hosts connect to, on the first host.
    """

    def __init__(
        self,
        facts: Facts,
        slots: Sequence[Slot],
        claim: Callable[[], object],
        listener: socket.socket | None = None,
    ) -> None:
        self._facts, self._slots, self._claim = facts, slots, claim
        self._watched = Watched(slots, facts.names[str(facts.host)])
        self._ranks: dict[int, socket.socket] = {}
        self._links: dict[int, Link] = {}
        self._listener = listener
        self._first: Link | None = None
        self._requests = 0
        self._expired_at: float | None = None
        self._answers: dict[int, Said] = {}
        self._collecting = False
        self._last = LastStep(len(facts.hosts), self._tell_all)

    # -- what `watch` calls -----------------------------------------------------------------------

    def begin(self, poll: select.epoll) -> None:
        """Connect to the other hosts."""
        self._poll = poll
        facts = self._facts
        if self._listener is not None:
            poll.register(self._listener, select.EPOLLIN)
        elif facts.port and facts.host:
            self._first = connect(facts.addresses, facts.port, facts.token, facts.host)
            if self._first is not None:
                self._add(self._first)

    def joined(self, rank: int, connection: socket.socket) -> None:
        """Store the connection of a rank."""
        self._ranks[rank] = connection

    def left(self, rank: int) -> None:
        """Remove a rank that has ended."""
        self._ranks.pop(rank, None)
        self._slots[self._facts.ranks.index(rank)].close()

    def event(self, number: int) -> bool:
        """Handle an event of a file; return whether it belongs to this object."""
        if self._listener is not None and number == self._listener.fileno():
            with contextlib.suppress(OSError):
                self._add(Link(self._listener.accept()[0]))
        elif number in self._links:
            self._read(self._links[number])
        else:
            return False
        return True

    def heard(self, rank: int, line: str) -> None:
        """Handle a message of a rank of this host."""
        what, *numbers = line.split()
        said: Said = {"what": what, "rank": rank, "numbers": [int(number) for number in numbers]}
        if self._first is not None and self._first.tell(said):
            return
        self._act(said)

    def look(self) -> None:
        """Look for a wait that has passed its deadline."""
        now = time.monotonic()
        rows = self._watched.look(now)
        if not any(row.expired for row in rows):
            self._expired_at = None
        elif self._first is not None and self._expired_at is None:
            self._expired_at = now
            if not self._first.tell({"what": "expired"}):
                self._expire()
        elif self._first is None or now > (self._expired_at or now) + 2 * ANSWER:
            self._expire()

    # -- actions ----------------------------------------------------------------------------------

    def _act(self, said: Said) -> None:
        """Handle a message, on the first host or if that cannot be reached."""
        what = said["what"]
        if self._collecting and what in ("table", "expired"):
            return  # the table is about to be printed
        if what == "table":
            rows, stacks = self._collect()
            self._print("", rows, stacks)
        elif what == "expired":
            self._expire()
        elif what == "signal":
            self._last.request(said["numbers"][0], said["rank"])
        elif what == "begun":
            self._last.answer(said["rank"], said["numbers"][0])

    def _expire(self) -> None:
        """Report, and end all ranks, unless a rank is in a phase without deadline."""
        rows, stacks = self._collect()
        if any(row.unlimited for row in rows):
            return
        self._claim()
        timeout = max(row.timeout for row in rows)
        self._print(f"no progress for {timeout:g} s (--timeout): ", rows, stacks)
        time.sleep(FORWARDING)
        for link in self._links.values():
            link.tell({"what": "end"})
        self._end()

    def _print(self, begin: str, rows: Sequence[Row], stacks: str) -> None:
        text = f"{begin}{sentence(rows)}\n{table(rows)}{stacks}"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    def _end(self) -> None:
        """End the ranks of this host and this process."""
        self._claim()
        self._tell(f"end {STATUS}")
        until = time.monotonic() + ENDING
        while time.monotonic() < until and any(map(_is_open, self._ranks.values())):
            time.sleep(0.05)
        for place, rank in enumerate(self._facts.ranks):
            if rank in self._ranks and _is_open(self._ranks[rank]):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    os.kill(self._slots[place].read().pid, signal.SIGKILL)
        os._exit(0)

    def _collect(self) -> tuple[list[Row], str]:
        """Return what the ranks of all hosts do, and the Python stacks of those that can run."""
        self._answers.clear()
        self._collecting = True
        asked = [link for link in self._links.values() if link.host > 0 and self._first is None]
        for link in asked:
            link.tell({"what": "rows?"})
        rows, stacks = self._own()
        until = time.monotonic() + ANSWER
        while time.monotonic() < until:
            missing = [one for one in asked if not one.closed and one.host not in self._answers]
            if not missing:
                break
            for link in select.select(missing, [], [], 0.1)[0]:
                self._read(link)
        self._collecting = False
        for host in sorted({*self._facts.hosts} - {self._facts.host}):
            answer = self._answers.get(host)
            if answer is not None:
                rows += [Row(**row) for row in answer["rows"]]
                stacks += answer["stacks"]
            else:
                name = self._facts.names[str(host)]
                silent = "cannot be asked: its host does not answer"
                rows += [Row(r, name, problem=silent) for r in self._facts.ranks_of(host)]
        return sorted(rows, key=lambda row: row.rank), stacks

    def _own(self) -> tuple[list[Row], str]:
        self._requests += 1
        self._tell(f"stacks {self._requests}")
        until, texts = time.monotonic() + STACKS, [""]
        rows = self._watched.look(time.monotonic())
        waiting = [place for place, row in enumerate(rows) if not row.problem]
        while waiting and time.monotonic() < until:
            time.sleep(0.02)
            waiting = [p for p in waiting if self._slots[p].shown(self._requests) is None]
        shown = [self._slots[place].shown(self._requests) for place in range(len(rows))]
        missing = [row for row, text in zip(rows, shown, strict=True) if not text]
        texts = [
            f"stack of rank {row.rank}:\n{text}"
            for row, text in zip(rows, shown, strict=True)
            if text
        ]
        if missing:
            texts.append(f"no stack of {names(missing)}\n")
        return rows, "".join(texts)

    # -- messages ---------------------------------------------------------------------------------

    def _tell(self, line: str) -> None:
        """Send a line to the ranks of this host."""
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):
                connection.send(f"{line}\n".encode(), socket.MSG_DONTWAIT)

    def _tell_all(self, line: str) -> None:
        self._tell(line)
        for link in self._links.values():
            link.tell({"what": "tell", "line": line})

    def _add(self, link: Link) -> None:
        self._links[link.fileno()] = link
        self._poll.register(link.fileno(), select.EPOLLIN)

    def _read(self, link: Link) -> None:
        """Handle the messages of another host."""
        number = link.fileno()
        for said in link.heard():
            self._hear(link, said)
        if link.closed:
            self._links.pop(number, None)
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(number)
            link.close()
            if link is self._first:
                self._first = None

    def _hear(self, link: Link, said: Said) -> None:
        what = said.get("what")
        if link is self._first:
            if what == "tell":
                self._tell(said["line"])
            elif what == "end":
                self._end()
            elif what == "rows?":
                rows, stacks = self._own()
                answer: dict[str, Any] = {"rows": [row.to_json() for row in rows]}
                link.tell({"what": "rows", "stacks": stacks, **answer})
        elif link.host < 0:
            if said.get("token") != self._facts.token:
                link.closed = True
            else:
                link.host = said["host"]
        elif what == "rows":
            self._answers[link.host] = said
        else:
            self._act(said)


def _is_open(connection: socket.socket) -> bool:
    """Return whether the process at the other end has not ended."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
