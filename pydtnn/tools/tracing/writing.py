"""The trace of a run, from its start to the files of all ranks."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.rule import RULE, VENDOR, Ruled
from pydtnn.comm.wrapper import Wrapper
from pydtnn.tools.tracing.recorder import Recorder
from pydtnn.tools.tracing.records import file_of, write_trace
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, RankFailure
from pydtnn.utils.files import unwritable

# Clocks of ranks: their offset from the clock of rank 0, by ping-pong.
#
# Rank 0 sends a message to each other rank in turn, which answers with the time of its clock. If
# both ways take the same time, the answer was sent in the middle between sending and receiving;
# whatever they take, the error is at most half of the round trip. The shortest of many round trips
# is used. Ranks of one host have the same clock, and therefore the reading of the first of them,
# unless their own contradicts it.
#
# References
# ----------
# Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.

CLOCK_ROUND_TRIPS = 200
"""Round trips with each rank."""

CLOCK_TAG = 32_000
"""Tag of the messages."""

CLOCK_PAUSE_S = 5e-4
"""Time between two tests of a rank that waits until it is its turn, in s."""


@dataclass(frozen=True)
class ClockReading:
    """A comparison of this rank's clock with that of rank 0.

    Attributes
    ----------
    time : int
        When it was made, in ns of this rank's clock.
    offset : int
        This clock minus that of rank 0, in ns.
    error : int
        Largest error of the offset, in ns.
    """

    time: int
    offset: int
    error: int


def read_clock(comm: Communicator) -> ClockReading:
    """Compare the clocks of all ranks with that of rank 0. Collective: all ranks call it.

    Ranks wait without using a core, so that the round trips of others are short. Virtual ranks read
    one clock and send nothing.
    """
    if clock.current().common:
        return ClockReading(clock.now_ns(), 0, 0)
    if comm.rank > 0:
        own = _answer(comm)
    else:
        for rank in range(1, comm.size):
            comm.send(_measure(comm, rank), rank, CLOCK_TAG)
        own = ClockReading(clock.now_ns(), 0, 0)
    first = comm.gather_object(own)[comm.hosts[comm.rank]]
    return first if abs(own.offset - first.offset) <= own.error + first.error else own


def _measure(comm: Communicator, rank: int) -> np.ndarray:
    """Return time, offset and error of another rank's clock."""
    ping, pong = np.zeros(1, "i8"), np.zeros(1, "i8")
    best, shortest = np.zeros(3, "i8"), 0
    for number in range(CLOCK_ROUND_TRIPS):
        arrival = comm.irecv(pong, rank, CLOCK_TAG)
        sent = clock.now_ns()
        comm.send(ping, rank, CLOCK_TAG)
        arrival.wait()
        taken = clock.now_ns() - sent
        if number == 0 or taken < shortest:
            shortest = taken
            best[:] = pong[0], pong[0] - (sent + taken // 2), taken // 2 + 1
    return best


def _answer(comm: Communicator) -> ClockReading:
    ping, pong = np.zeros(1, "i8"), np.zeros(1, "i8")
    for number in range(CLOCK_ROUND_TRIPS):
        arrival = comm.irecv(ping, 0, CLOCK_TAG)
        while number == 0 and not arrival.test():
            time.sleep(CLOCK_PAUSE_S)
        arrival.wait()
        pong[0] = clock.now_ns()
        comm.send(pong, 0, CLOCK_TAG)
    result = np.zeros(3, "i8")
    comm.recv(result, 0, CLOCK_TAG)
    return ClockReading(*map(int, result))


def describe_clock(start: ClockReading, stop: ClockReading | None) -> dict[str, float]:
    """Return the entry "clock" of a trace: see `pydtnn.tools.tracing.records.RankTrace`.

    Parameters
    ----------
    start, stop : Reading
        At the start and at the end of the run. Without the latter the drift is taken to be 0.
    """
    drift, error = 0.0, start.error
    if stop is not None and stop.time > start.time:
        drift = (stop.offset - start.offset) / (stop.time - start.time)
        error = max(error, stop.error)
    return {"offset": start.offset, "drift": drift, "origin": start.time, "error": error}


class Trace:
    """A context manager that writes what a recorder has recorded into a folder.

    Collective: all ranks enter and leave the context. Clocks are compared at both ends. If an error
    of a single rank ends the context, it writes its records up to there, without comparing clocks
    again; the last records of all ranks are in the flight record of the run.

    Parameters
    ----------
    folder : str or Path
        Created if necessary, on each host; must not contain a trace.
    recorder : Recorder
        One of the observers of the trainer.
    comm : Communicator
        The ranks of the trainer, such as ``trainer.comm``.
    memory : object, optional
        The pool of the trainer's backend, ``trainer.model.backend.memory``: the bytes in use are
        stored with phases and layers.
    layers, machine : mapping, optional
        Entries of `RankTrace.about`. They may be filled before the context ends.
    failures : sequence, optional
        Descriptions of the failures of ranks so far, after which this context continues the trace
        of an earlier one; those that follow may be added.
    begun : callable, optional
        Returns whether there is something to write if an error ends the context, the same on all
        ranks.

    Attributes
    ----------
    records : int
        Records of all ranks, once they are written.
    error : int
        Largest error of the clocks, in ns, once they have been compared.

    Raises
    ------
    AgreedError
        On all ranks, before the context and before any work, if the folder cannot be written on any
        rank or contains a trace; at its end, if a file cannot be written.

    Examples
    --------
    >>> recorder = Recorder()
    >>> trainer = Trainer(model, "sgd", observers=[recorder])  # doctest: +SKIP
    >>> with Trace("trace", recorder, trainer.comm):  # doctest: +SKIP
    ...     trainer.fit(data)
    """

    def __init__(
        self,
        folder: str | Path,
        recorder: Recorder,
        comm: Communicator,
        *,
        memory: Any = None,
        layers: Mapping[str, Any] | None = None,
        machine: Mapping[str, Any] | None = None,
        failures: Sequence[object] = (),
        begun: Callable[[], bool] = lambda: True,
    ) -> None:
        self.folder, self.recorder, self.comm = Path(folder), recorder, comm
        self.layers, self.machine = layers or {}, machine or {}
        self.failures, self._begun = failures, begun
        self.records = self.error = 0
        self._memory = memory
        self._start = ClockReading(0, 0, 0)

    def __str__(self) -> str:
        ranks = self.comm.size
        clocks = f", clocks equal within {self.error / 1e3:.1f} us" if ranks > 1 else ""
        return (
            f"trace: {self.records:,} records of {ranks} rank{'s' * (ranks > 1)} in {self.folder}"
            f"{clocks}; see python -m pydtnn trace summary {self.folder}"
        )

    def __enter__(self) -> Trace:
        if not self.failures:
            check_folder(self.folder, self.comm)
        elif self.comm.local_rank == 0:  # files of ranks that had others, at the end of training
            for path in self.folder.glob("rank-*.npz"):
                path.unlink(missing_ok=True)
        with self.comm.traffic.apart():
            self._start = read_clock(self.comm)
        self.recorder.watch(self._memory)
        traffic = self.comm.traffic
        self.recorder.count(lambda: traffic.bytes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.recorder.watch(None)
        self.recorder.count(None)
        if kind is not None and (issubclass(kind, RankFailure) or not self._begun()):
            return  # the other ranks continue, and write later; or what was to begin is refused
        if kind is not None and not issubclass(kind, AgreedError):  # not all ranks are here
            with contextlib.suppress(OSError):  # the error that has ended the context is raised
                self._write(None)
            return
        with self.comm.traffic.apart():
            stop, problem = read_clock(self.comm), None
        try:
            records, error_of_clock = self._write(stop)
        except OSError as failed:
            problem = unwritable("trace", file_of(self.folder, self.comm.rank), failed)
        agree(self.comm, problem)
        everywhere = self.comm.gather_object((records, error_of_clock))
        self.records = sum(records for records, _ in everywhere)
        self.error = max(error for _, error in everywhere)

    def _write(self, stop: ClockReading | None) -> tuple[int, int]:
        """Write this rank's file; return the number of records and the error of the clock."""
        recorder, comm = self.recorder, self.comm
        records, clock = recorder.records(), describe_clock(self._start, stop)
        places = {rank: place for place, rank in enumerate(comm.members)}
        records["peer"] = [places.get(peer, -1) for peer in records["peer"].tolist()]
        about = {
            "rank": comm.rank,
            "size": comm.size,
            "host": platform.node(),
            "pid": os.getpid(),
            "lanes": recorder.lanes,
            "command": shlex.join(sys.argv),
            "clock": clock,
            "sent": recorder.sent,
            "allreduce": allreduce_of(comm),
            "layers": dict(self.layers),
            "machine": dict(self.machine),
            "failures": [str(failure) for failure in self.failures],
        }
        write_trace(self.folder, records, recorder.names, about)
        return len(records), int(clock["error"])


def allreduce_of(comm: Communicator) -> str:
    """Return the name of the algorithm of a communicator's sums, as `create_allreduce` takes it."""
    while isinstance(comm, Wrapper) and not isinstance(comm, Scheduled):
        comm = comm.inner
    if isinstance(comm, Scheduled) and not isinstance(comm, Ruled):
        return str(getattr(comm.algorithm, "__name__", comm.algorithm))
    return VENDOR if comm.size > comm.local_size and not isinstance(comm, Ruled) else RULE


def check_folder(folder: str | Path, comm: Communicator, who: str = "trace") -> None:
    """Test that the folder of a trace can be written on each host. Collective: all ranks call it.

    It is created when the trace is written.

    Parameters
    ----------
    folder : str or Path
    comm : Communicator
    who : str
        First word of errors.

    Raises
    ------
    AgreedError
        On all ranks, if it is not writable on any rank, or contains a trace.
    """
    folder, problem = Path(folder), cast("Exception | None", None)
    try:
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=place):
            pass
        found = sorted(folder.glob("rank-*.npz"))
        if found:
            problem = ValueError(
                f"{who}: expected a folder without a trace, got {folder} with {found[0].name}; "
                "remove it, or choose another folder"
            )
    except OSError as error:
        problem = unwritable(who, folder, error)
    agree(comm, problem)
