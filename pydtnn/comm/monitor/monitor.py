"""The monitor process of a host: deadlines, the table of ranks, and the end of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from pydtnn.comm.monitor.flight import remove_stale, write_flight
from pydtnn.comm.monitor.links import (
    FLIGHT_TIMEOUT_S,
    FORWARDING_S,
    INTERVAL_S,
    LOST_STATUS,
    OF_RANK,
    HostLink,
    Message,
    connect,
)
from pydtnn.comm.monitor.ranks import RECENT_KILL_S, EndReport, RankConnection
from pydtnn.comm.monitor.slots import SURVIVES, Facts, Slot
from pydtnn.comm.monitor.state import FAILED, LEFT, LOST, LastStepVote, RunState, WatchedRun
from pydtnn.comm.monitor.table import (
    RankRow,
    Watched,
    awaited_ranks,
    names,
    sentence,
    table,
)
from pydtnn.utils.errors import printable, write_error

TIMEOUT_STATUS = 75
"""Exit status of a run in which a wait has passed its deadline (EX_TEMPFAIL of sysexits.h)."""

ANSWER_TIMEOUT_S = {"stacks": (5.0, 8.0), "flight": (0.0, FLIGHT_TIMEOUT_S)}
"""Seconds to wait for what the ranks of a host answer, several where cores are few, and for what
other hosts do."""

FIRST_SILENT_S = 16.0
"""Seconds after which the process of the first host does not answer, twice those for the rows."""

SAME_REQUEST_S = 4.0
"""Seconds in which requests for the table are the same one, sent to every process of the job."""

MAX_UNKNOWN_CONNECTIONS = 16
"""Connections that have not sent the token yet; the oldest are closed when there are more."""

LATE_S = 2.0
"""Seconds after which no further message of a rank that has exited is expected."""

SURVIVED_S = 1.0
"""Seconds from the failure of a rank to the flight records, in which the others recover."""

END_TIMEOUT_S = 2.0
"""Seconds in which a rank that can run ends after it has been ordered to; then it is killed."""


def receive_facts() -> tuple[Facts, socket.socket | None]:
    """Receive the facts, and the listener for other hosts, over the standard input."""
    text, files = b"", list[int]()
    with socket.socket(fileno=0) as sender:
        while received := socket.recv_fds(sender, 1 << 16, 1):
            text += received[0]
            files += received[1]
            if not received[0]:
                break
    return Facts(**json.loads(text)), socket.socket(fileno=files[0]) if files else None


class HostMonitor:
    """Watches the slots of this host; on the first host it also reports for all.

    Parameters
    ----------
    facts : Facts
    slots : sequence of Slot
        Of the ranks of this host, in their order.
    end_report : EndReport
    poll : epoll
        With which the connections are registered.
    connections : dict of int to RankConnection
        Of the ranks of this host, by the numbers of their sockets.
    listener : socket, optional
        Where the processes of the other hosts connect to, on the first host.
    """

    def __init__(
        self,
        facts: Facts,
        slots: Sequence[Slot],
        end_report: EndReport,
        poll: select.epoll,
        connections: dict[int, RankConnection],
        listener: socket.socket | None = None,
    ) -> None:
        self._facts, self._slots, self._end_report = facts, slots, end_report
        self._poll, self._connections = poll, connections
        self._run = WatchedRun(facts.ranks, RunState.STARTING)
        self._run.on("ready")
        self._watched = Watched(slots, facts.names[str(facts.host)])
        self._links: dict[int, HostLink] = {}
        self._listener = listener
        self._first: HostLink | None = None
        self._request = self._requests = 0
        self._expired_at: float | None = None
        self._printed_at = -SAME_REQUEST_S
        self._answers: dict[int, tuple[list[RankRow], str]] = {}
        self._collecting = self._recorded = self._warned = False
        self._later: tuple[float, Sequence[RankRow], str] | None = None
        self._why = "the end of the run"  # what the first host knows better
        self._last = LastStepVote(len(facts.hosts), self._tell_all)
        self._exited: dict[int, dict[str, Any]] = {}  # the calls of ranks whose programs have ended
        self._lost: set[int] = set()  # ranks of all hosts without which others continue
        self._excluded_at = -math.inf
        self._reported_at = math.inf

        if listener is not None:
            poll.register(listener, select.EPOLLIN)
        elif facts.port and facts.host:
            self._first = connect(facts.address, facts.port, facts.token, facts.host)
            if self._first is not None:
                self._add(self._first)

    def run(self) -> None:
        """Watch the ranks until all have ended."""
        for one in [*self._connections.values()]:  # what has arrived before all were connected
            self._read_rank(one)
        look_at = 0.0
        while self._connections:
            events = self._poll.poll(INTERVAL_S)
            if time.monotonic() >= look_at:  # however many messages arrive
                self.look()
                look_at = time.monotonic() + INTERVAL_S
            for number, _ in events:
                self.event(number)
            if not events:
                self._end_report.kills.remember(RECENT_KILL_S)
        self._remove_files()

    def _remove_files(self) -> None:
        """Remove what MPI leaves in memory if ranks are killed."""
        for path in self._facts.files:
            with contextlib.suppress(OSError):
                os.unlink(path)

    # -- events -----------------------------------------------------------------------------------

    def event(self, number: int) -> None:
        """Handle an event of a file: a message, a new connection or the end of one."""
        if self._listener is not None and number == self._listener.fileno():
            self._close_strangers(MAX_UNKNOWN_CONNECTIONS - 1)
            try:
                self._add(HostLink(self._listener.accept()[0], self._facts.token))
            except OSError:  # no more open files, or the other side has gone
                self._close_strangers(0)
        elif number in self._links:
            self._read(self._links[number])
        elif number in self._connections:
            self._connections[number].read(self._poll)
            self._read_rank(self._connections[number])

    def _read_rank(self, one: RankConnection) -> None:
        """Handle the messages of a rank of this host, and its end."""
        messages, one.messages = one.messages, []
        for name, facts in messages:
            if name in OF_RANK:
                self.heard(one.rank, name, facts[1])
            elif name == "exited" and (self._first is None or not self._first.send(name, *facts)):
                self._exit(*facts)
        if one.closed:
            del self._connections[one.fileno()]
            with contextlib.suppress(OSError):
                self._poll.unregister(one)
            one.close()
            if one.left:
                self._slot(one.rank).close()
                self._run.end_of(one.rank, LEFT)
            else:
                self.failed(one.rank)

    def _exit(self, rank: int, calls: dict[str, Any]) -> None:
        """The program of a rank has ended, after so many collective calls of each of its groups."""
        self._exited[rank] = calls
        for link in self._links.values():
            link.send("exited", rank, calls)

    def _slot(self, rank: int) -> Slot:
        return self._slots[self._facts.ranks.index(rank)]

    @property
    def _survives(self) -> bool:
        """Whether ranks continue without those that fail."""
        return any(slot.words[SURVIVES] for slot in self._slots)

    def failed(self, rank: int) -> None:
        """A rank of this host has failed: it has ended without announcing that.

        Unless they survive, all other ranks are ended, by the rank that has reported an error if
        there is one, and by this process if it fails to. None survives an error that is reported.
        """
        if self._end_report.claimed:
            self._run.on("reported")
        actions = self._run.end_of(rank, LOST if self._survives else FAILED)
        if "go on" in actions:
            rows = self._watched.look(time.monotonic())  # with this rank
            self._later = time.monotonic() + SURVIVED_S, rows, f"rank {rank} has failed"
            self._slot(rank).fail()
            self.heard(rank, "failed")
        elif actions:
            self._end_because_of(rank)

    def _end_because_of(self, rank: int) -> None:
        reported = self._end_report.report(rank)  # first: ranks whose calls of MPI fail wait for it
        if not self._recorded:
            self._record(f"rank {rank} has ended unexpectedly")
            self._recorded = True
        if reported and not self._survives:  # where ranks may fail, MPI ends none of the others
            self._await_end()
        self._end_of_host(rank, 1 if reported else LOST_STATUS)

    def _end_of_host(self, rank: int, status: int) -> None:
        """End all ranks because of one of this host."""
        if self._first is not None:
            self._first.send("failed", rank, 1)
            time.sleep(FORWARDING_S)
            self._end(status)
        self._end_all(status)

    def heard(self, rank: int, name: str, number: int = 0) -> None:
        """Handle a message of a rank of this host, or about it."""
        if self._first is None or not self._first.send(name, rank, number):
            self._act(name, rank, number)

    def look(self) -> None:
        """Look for a wait that has passed its deadline, and for ranks that remain after an error.

        A thread, a function of `atexit` or a child process may keep a rank.
        """
        now = time.monotonic()
        if self._later is not None and now > self._later[0]:
            (_, survived, why), self._later = self._later, None
            self._record(why, survived)
        rows = self._watched.look(now)
        if self._end_report.claimed:
            self._run.on("reported")
            self._reported_at = min(self._reported_at, now)
            limit = max((row.timeout for row in rows), default=0.0)
            if 0 < limit < now - self._reported_at and self._run.on("overdue"):
                here = {one.rank for one in self._connections.values()}
                left = names([row for row in rows if row.rank in here])
                _write(f"{left}: not ended {limit:g} s (--timeout) after the error; killed\n")
                self._end_all(1)
        for row, (rank, calls) in itertools.product(rows, self._exited.items()):
            missed = row.seconds > 0 and calls.get(row.group) in range(row.number)
            if missed or (row.peer == rank and row.seconds >= LATE_S):
                self._end_absence(row, rank)
        stopped = [row for row in rows if row.stopped and 0 < row.timeout <= row.seconds]
        if self._survives and stopped and not all(row.stopped for row in rows):
            self._exclude(rows, stopped)  # also if no call of another rank is known that waits
        settling = any(now < self._excluded_at + row.timeout for row in rows)
        if settling or not any(row.expired for row in rows):
            self._expired_at = None
        elif self._first is not None and self._expired_at is None:
            self._expired_at = now
            if not self._first.send("expired", -1, 0):
                self._expire()
        elif self._first is None or now > (self._expired_at or now) + FIRST_SILENT_S:
            self._expire()

    def _end_absence(self, row: RankRow, rank: int) -> None:
        """End all ranks, as one waits for another whose program has ended."""
        if self._run.on("absent"):
            self._why = f"rank {rank} has ended"
            if self._end_report.claim():
                _write(
                    f"rank {row.rank}: waits in {row.waits} for rank {rank}, whose program has "
                    "ended; all ranks must make the same calls, and leave together\n"
                )
            self._end_of_host(row.rank, 1)

    # -- actions ----------------------------------------------------------------------------------

    def _act(self, name: str, rank: int, number: int) -> None:
        """Handle a message of a rank, on the first host or if that cannot be reached."""
        if name == "table":
            if not self._collecting and time.monotonic() > self._printed_at + SAME_REQUEST_S:
                self._print("", *self._collect("stacks"))
        elif name == "expired":
            self._expire()
        elif name == "signal":
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._last.request(number, rank, time.monotonic())
            linked = {one.host for one in self._links.values() if one.known and not one.closed}
            if self._other_hosts() - linked:
                self._last.give_up()  # some ranks cannot be reached
        elif name == "begun":
            self._last.answer(rank, number)
        elif name == "flight":
            self._why = f"an error of rank {rank}"
            if not self._collecting:
                self._collect("flight")
            self._tell_all("finished")
        elif name == "failed" and not number:
            self._lost.add(rank)
            self._last.lose(rank)
        elif name == "failed":
            self._end_all(LOST_STATUS)

    def _other_hosts(self) -> set[int]:
        """Return the other hosts with ranks that remain."""
        remaining = {host for rank, host in enumerate(self._facts.hosts) if rank not in self._lost}
        return remaining - {self._facts.host}

    def _expire(self) -> None:
        """Report, and end all ranks, unless a rank is in a phase without deadline.

        Ranks that survive continue without those that are late.
        """
        if self._collecting:  # the table is about to be printed
            return
        rows, stacks = self._collect("stacks")
        if any(row.unlimited for row in rows) or not any(row.expired for row in rows):
            return
        if self._survives and self._exclude(rows, awaited_ranks(rows)):
            return
        if self._run.on("late"):
            self._end_report.claim()
            timeout = max(row.timeout for row in rows)
            self._print(f"no progress for {timeout:g} s (--timeout): ", rows, stacks)
            self._why = "a wait has passed its deadline"
            self._collect("flight")
            if self._slots[0].folder:
                run = os.path.dirname(self._slots[0].folder)
                _write(f"see python -m pydtnn trace flight {run}\n")
            self._end_all(TIMEOUT_STATUS)

    def _exclude(self, rows: Sequence[RankRow], late: Sequence[RankRow]) -> bool:
        """Kill ranks that are late, also if they are stopped; return whether there were some."""
        ranks = self._run.exclude([row.rank for row in late])
        if not ranks:
            return False
        excluded = [row for row in late if row.rank in ranks]
        timeout = max(row.timeout for row in rows)
        _write(
            f"no progress for {timeout:g} s (--timeout): {sentence(rows)}; {names(excluded)} "
            f"{'are' if len(excluded) > 1 else 'is'} excluded\n"
        )
        self._excluded_at = time.monotonic()
        for rank in ranks:
            self._kill(rank)
            for link in self._links.values():
                link.send("exclude", rank)
        return True

    def _kill(self, rank: int) -> None:
        """Kill a rank if it is one of this host."""
        for one in self._connections.values():
            if one.rank == rank:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    os.kill(_process_of(one.socket), signal.SIGKILL)

    def _record(self, why: str, rows: Sequence[RankRow] = ()) -> None:
        """Write the flight records of the ranks of this host, by default of those that remain."""
        rows = rows or self._watched.look(time.monotonic())
        for row in rows:
            slot, size = self._slot(row.rank), len(self._facts.hosts)
            try:
                if slot.folder:
                    write_flight(slot, row, size, why)
                    if row.rank == 0:
                        remove_stale(slot.folder, size)
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _write(f"warning: the flight record cannot be written: {error}\n")

    def _print(self, begin: str, rows: Sequence[RankRow], stacks: str) -> None:
        _write(f"{begin}{sentence(rows)}\n{table(rows)}{stacks}")
        self._printed_at = time.monotonic()

    def _end_all(self, status: int) -> None:
        """End the ranks of all hosts and this process."""
        time.sleep(FORWARDING_S)
        for link in self._links.values():
            link.send("end", status)
        self._end(status)

    def _end(self, status: int) -> None:
        """End the ranks of this host and this process."""
        self._run.on("end")
        self._end_report.claim()
        if not self._recorded:
            self._record(self._why)
        self._tell("end", status)
        self._await_end()
        for one in filter(_is_open, self._connections.values()):
            for kill in (os.kill, os.killpg):  # children hold the connection, too
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    kill(_process_of(one.socket), signal.SIGKILL)
        self._remove_files()
        os._exit(0)

    def _await_end(self) -> None:
        """Wait until the ranks of this host have ended, for a while."""
        until = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < until and any(map(_is_open, self._connections.values())):
            time.sleep(0.05)

    def _collect(self, line: str) -> tuple[list[RankRow], str]:
        """Write the flight records of all ranks; return what they do, and for "stacks" these."""
        self._answers.clear()
        self._collecting = True
        self._request += 1
        linked = [link for link in self._links.values() if link.host > 0 and self._first is None]
        for link in linked:
            link.send("answer", line, self._request)
        rows, texts = self._local(line)
        until = time.monotonic() + ANSWER_TIMEOUT_S[line][1]
        while time.monotonic() < until:
            missing = [one for one in linked if not one.closed and one.host not in self._answers]
            if not missing:
                break
            poll = select.poll()  # select has no numbers above 1023
            for link in missing:
                poll.register(link, select.POLLIN)
            ready = {number for number, _ in poll.poll(100)}
            for link in missing:
                if link.fileno() in ready:
                    self._read(link)
        self._collecting = False
        for host in sorted(self._other_hosts()):
            if host in self._answers:
                others, more = self._answers[host]
                rows += others
                texts += more
            else:
                name = self._facts.names[str(host)]
                silent = "cannot be asked: its host does not answer"
                rows += [RankRow(rank, name, problem=silent) for rank in self._remaining(host)]
        return sorted(rows, key=lambda row: row.rank), texts

    def _remaining(self, host: int) -> list[int]:
        return [rank for rank in self._facts.ranks_of(host) if rank not in self._lost]

    def _local(self, line: str) -> tuple[list[RankRow], str]:
        """Do what `_collect` does for the ranks of this host."""
        self._record("on request" if line == "stacks" else self._why)
        until = time.monotonic() + ANSWER_TIMEOUT_S[line][0]
        rows = self._watched.look(time.monotonic())
        if line == "flight":
            self._recorded = True
            return rows, ""
        self._requests += 1
        self._tell("answer", line, self._requests)
        waiting = self._watched.running()
        while waiting and time.monotonic() < until:
            time.sleep(0.02)
            waiting = [p for p in waiting if self._slots[p].shown(self._requests) is None]
        shown = [(row, self._slot(row.rank).shown(self._requests)) for row in rows]
        texts = [f"stack of rank {row.rank}:\n{text}" for row, text in shown if text]
        missing = [row for row, text in shown if not text]
        return rows, "".join([*texts, f"no stack of {names(missing)}\n" if missing else ""])

    # -- messages ---------------------------------------------------------------------------------

    def _tell(self, name: str, *facts: object) -> None:
        """Send a message to the ranks of this host."""
        for one in self._connections.values():
            one.send(name, *facts)

    def _tell_all(self, name: str, *facts: object) -> None:
        self._tell(name, *facts)
        for link in self._links.values():
            link.send(name, *facts)

    def _add(self, link: HostLink) -> None:
        self._links[link.fileno()] = link
        self._poll.register(link.fileno(), select.EPOLLIN)

    def _close_strangers(self, most: int) -> None:
        """Close the oldest connections without a token."""
        strangers = [link for link in self._links.values() if link.host < 0]
        for link in strangers[: max(len(strangers) - most, 0)]:
            self._drop(link, link.fileno())

    def _drop(self, link: HostLink, number: int) -> None:
        self._links.pop(number, None)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(number)
        link.close()

    def _read(self, link: HostLink) -> None:
        """Handle the messages of another host."""
        number, known = link.fileno(), link.known
        messages = link.receive()
        if link.known and not known and link is not self._first:
            others = {one.host for one in self._links.values() if one is not link}
            if link.host == self._facts.host or link.host not in {*self._facts.hosts} - others:
                link.closed, link.host = True, -1  # no host that is missing
            else:
                link.greet()
        for message in messages if link.known and not link.closed else ():
            self._hear(link, message)
        if link.closed:
            self._drop(link, number)
            if link is self._first or link.host in self._other_hosts():
                self._last.give_up()
            if link is self._first:
                self._first = None

    def _hear(self, link: HostLink, message: Message) -> None:
        """Handle a message of another host."""
        name, facts = message
        if link is self._first:
            if name in ("freeze", "last", "finished"):
                self._tell(name, *facts)
            elif name == "exited":
                self._exited[facts[0]] = facts[1]
            elif name == "end":
                self._end(*facts)
            elif name == "exclude":
                self._excluded_at = time.monotonic()
                self._kill(*facts)
            elif name == "answer" and facts[0] in ANSWER_TIMEOUT_S:
                rows, texts = self._local(facts[0])
                link.send("rows", facts[1], [*map(astuple, rows)], texts)
        elif name == "exited":
            self._exit(*facts)
        elif name == "rows":
            with contextlib.suppress(TypeError, ValueError):
                rows = [RankRow.from_json(row) for row in facts[1]]
                complete = [row.rank for row in rows] == self._remaining(link.host)
                if complete and facts[0] == self._request:  # not of an earlier one
                    self._answers[link.host] = rows, facts[2]
        elif name == "expired" or (name in OF_RANK and facts[0] in self._facts.ranks_of(link.host)):
            self._act(name, *facts)


def _write(text: str) -> None:
    write_error(printable(text))


def _process_of(connection: socket.socket) -> int:
    """Return the process at the other end."""
    options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", options)[0])


def _is_open(one: RankConnection) -> bool:
    """Return whether a rank has not ended."""
    try:
        return bool(one.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
