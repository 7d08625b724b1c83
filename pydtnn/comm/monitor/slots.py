"""What each rank of a host is doing, in memory that its ranks and another process share.

A slot of the shared file belongs to one rank. Its main thread writes a few 64-bit words at each
change, without a system call and without a lock, so that the process that reads them also sees what
a rank was doing that is stopped. Names are written once, into a table of the slot.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field

SLOT = 1 << 19
"""Length of a slot, in B; pages that are not written need no memory."""

PID, RANK, TIMEOUT, EPOCH, STEP, MOVES, DEPTH, STACK = range(8)
"""Words of a slot: process, rank, deadline of a wait in ms (0: none), position in training, number
of changes, number of nested activities, and the first of them."""

DEEPEST = 16
"""Nested activities that are stored."""

CALLING, CALL, GROUP, NUMBER, PEER, SHOWN, LENGTH = range(STACK + DEEPEST, STACK + DEEPEST + 7)
"""Words of a slot: whether the rank is in a call of a communicator, the call's name, its group, its
number in the group (0 for messages), the rank at the other end; the last request of the monitor
process that the rank has answered, and the length of the answer."""

ENDED = STACK + DEEPEST + 9
"""Word that the monitor process writes: when the rank has failed, in ns of the monotonic clock (0:
it has not)."""

SURVIVES = STACK + DEEPEST + 10
"""Word of a slot: whether the rank continues without ranks that fail."""

LANES, LANE, MOST_LANES = 35, 12, 7
"""First word of the lanes of other threads, words of each, and their maximum number: its name, the
number of changes, the number of nested activities, the activities."""

_FIRST_OF_LANES = range(LANES, LANES + LANE * MOST_LANES, LANE)

NAMES, NAME = 1024, 64
"""First byte of the table of names, and bytes of a name."""

RING, RECORD = 1 << 17, 64
"""First byte of the ring of records, and bytes of a record: their number so far, from the second
record on the newest ones (`pydtnn.utils._recorder.Shared`)."""

CAPACITY = (SLOT - RING) // RECORD - 1
"""Records in the ring."""

TEXT = RING - (1 << 14)
"""First byte of the Python stack, as text."""

FOLDER = TEXT - (1 << 12)
"""First byte of the folder in which the records are stored when a run fails; empty for none."""

FLIGHT = "flight"
"""Name of that folder in the folder of a run."""

MAX_NAMES = (FOLDER - NAMES) // NAME


@dataclass
class Doing:
    """An activity: its kind, its name, and its bucket or -1."""

    kind: int
    name: str
    bucket: int = -1


@dataclass
class CurrentCall:
    """A call of a communicator that a rank is in; see `pydtnn.comm.monitor.attendance.Wait`."""

    name: str
    group: str
    number: int
    peer: int


@dataclass
class Content:
    """The content of a slot.

    Attributes
    ----------
    rank, pid : int
    timeout : float
        Longest duration of a wait, in s; 0 for no limit.
    epoch, step : int
        -1 outside of training.
    moves : int
        Changes so far; if it is unchanged the rank is in the same activity.
    stack : list of Doing
        Activities of the main thread, innermost last.
    call : Call or None
    lanes : dict of str to list of Doing
        Activities of other threads.
    """

    rank: int
    pid: int
    timeout: float
    epoch: int
    step: int
    moves: int
    stack: list[Doing] = field(default_factory=list)
    call: CurrentCall | None = None
    lanes: dict[str, list[Doing]] = field(default_factory=dict)


class Slot:
    """A slot, for the rank that writes it and for the process that reads it.

    Parameters
    ----------
    memory : memoryview of bytes
        The slots of a host.
    place : int
        Number of the slot.

    Attributes
    ----------
    words : memoryview of int64
        The words named above.
    """

    def __init__(self, memory: memoryview, place: int = 0) -> None:
        self._bytes = memory[place * SLOT : (place + 1) * SLOT]
        self.words = self._bytes[:NAMES].cast("q")
        self._numbers: dict[str, int] = {}

    def clear(self, rank: int, timeout: float) -> None:
        """Initialise the slot for this process."""
        self.words[RANK], self.words[PID] = rank, os.getpid()
        self.words[EPOCH] = self.words[STEP] = -1
        self.words[ENDED] = self.words[SURVIVES] = 0
        self.limit(timeout)
        self.folder = ""
        self.number("?")

    @property
    def rank(self) -> int:
        """The rank that it belongs to."""
        return self.words[RANK]

    def limit(self, timeout: float) -> None:
        """Set the longest duration of a wait, in s; 0 for no limit."""
        self.words[TIMEOUT] = round(1000 * timeout)

    def close(self) -> None:
        """Mark that the process has ended, as was expected."""
        self.words[PID] = 0

    def fail(self) -> None:
        """Mark that the process has failed, and others continue without it."""
        self.words[ENDED] = time.monotonic_ns()
        self.close()

    def number(self, name: str) -> int:
        """Return the number of a name, which is added to the table; 0 if that is full."""
        number = self._numbers.get(name)
        if number is None:
            number = len(self._numbers)
            if number == MAX_NAMES:
                return 0
            begin = NAMES + number * NAME
            text = name.encode()[: NAME - 1].decode(errors="ignore").encode() or b"?"
            self._bytes[begin : begin + NAME] = text.ljust(NAME, b"\0")
            self._numbers[name] = number
        return number

    @property
    def folder(self) -> str:
        """The folder in which the records are stored when a run fails; empty for none."""
        return os.fsdecode(bytes(self._bytes[FOLDER:TEXT]).partition(b"\0")[0])

    @folder.setter
    def folder(self, folder: str) -> None:
        text = os.fsencode(folder)
        self._bytes[FOLDER:TEXT] = (text if len(text) < TEXT - FOLDER else b"").ljust(
            TEXT - FOLDER, b"\0"
        )

    @property
    def ring(self) -> memoryview:
        """The memory of the records."""
        return self._bytes[RING:]

    def records(self) -> tuple[bytes, int]:
        """Return the newest records, the oldest of them first, and the number of all so far.

        They may change meanwhile: those that may have been replaced are left out.
        """
        before = self._bytes[RING : RING + 8].cast("q")[0]
        data = bytes(self._bytes[RING + RECORD :])
        number = self._bytes[RING : RING + 8].cast("q")[0]
        first = max(number - CAPACITY + 1, 0)
        places = (place % CAPACITY * RECORD for place in range(first, before))
        return b"".join(data[place : place + RECORD] for place in places), number

    def names(self) -> list[str]:
        """Return the names in the table."""
        found: list[str] = []
        while len(found) < MAX_NAMES and self._bytes[NAMES + len(found) * NAME]:
            found.append(self._name(len(found)))
        return found

    def show(self, request: int, text: str) -> None:
        """Store a text, such as the Python stacks, as the answer to a request."""
        data = text.encode(errors="replace")[: RING - TEXT]
        self._bytes[TEXT : TEXT + len(data)] = data
        self.words[LENGTH] = len(data)
        self.words[SHOWN] = request

    def shown(self, request: int) -> str | None:
        """Return the answer to a request; None if there is none yet."""
        if self.words[SHOWN] != request:
            return None
        length = self.words[LENGTH]
        return bytes(self._bytes[TEXT : TEXT + length]).decode(errors="replace")

    def read(self) -> Content:
        """Return the content, which may change meanwhile."""
        words = self.words
        call = None
        if words[CALLING]:
            name, group = self._name(words[CALL]), self._name(words[GROUP])
            call = CurrentCall(name, group, words[NUMBER], words[PEER])
        return Content(
            words[RANK],
            words[PID],
            words[TIMEOUT] / 1000,
            words[EPOCH],
            words[STEP],
            words[MOVES],
            self._activities(STACK, min(words[DEPTH], DEEPEST)),
            call,
            dict(self._lane(first) for first in _FIRST_OF_LANES if words[first]),
        )

    def _lane(self, first: int) -> tuple[str, list[Doing]]:
        depth = min(self.words[first + 2], LANE - 3)
        return self._name(self.words[first]), self._activities(first + 3, depth)

    def _activities(self, first: int, depth: int) -> list[Doing]:
        codes = (self.words[first + level] for level in range(depth))
        return [Doing(c & 0xFF, self._name(c >> 8 & 0xFFFFFF), (c >> 32) - 1) for c in codes]

    def _name(self, number: int) -> str:
        """Return a name by its number."""
        begin = NAMES + number * NAME
        text = bytes(self._bytes[begin : begin + NAME]).partition(b"\0")[0]
        return text.decode(errors="replace")


@dataclass
class Facts:
    """What the process receives when it starts.

    Attributes
    ----------
    hosts : list of int
        Host of each rank, by the first rank on it.
    host : int
        This host.
    names : dict of str to str
        Names of the hosts, by number.
    address : str
        Of the first host.
    port : int
        Of the process on the first host; 0 if there is one host.
    token : str
        With which connections to it begin.
    files : list of str
        In memory, of this host, by which ranks communicate: MPI leaves them if ranks are killed.
    """

    hosts: list[int]
    host: int
    names: dict[str, str]
    address: str = ""
    port: int = 0
    token: str = ""
    files: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host."""
        return self.ranks_of(self.host)

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, other in enumerate(self.hosts) if other == host]


def slots_in(file: int, number: int) -> list[Slot]:
    """Return the slots in a shared file."""
    memory = memoryview(mmap.mmap(file, number * SLOT))
    return [Slot(memory, place) for place in range(number)]
