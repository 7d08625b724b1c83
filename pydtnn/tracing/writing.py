"""The trace of a run, from its start to the files of all ranks."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from pydtnn.comm import Communicator, agree
from pydtnn.comm.metered import Metered
from pydtnn.tracing.clock import Reading, describe_clock, read_clock
from pydtnn.tracing.recorder import Recorder
from pydtnn.tracing.records import file_of, write_trace
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.files import unwritable


class Trace:
    """A context manager that writes what a recorder has recorded into a folder.

    Collective: all ranks enter and leave the context. Clocks are compared at both ends. If an error
    of a single rank ends the context, or a wait that passes its deadline ends the run, each rank
    that can run writes its records up to there, without comparing clocks again.

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
        Entries of `pydtnn.tracing.RankTrace.about`. They may be filled before the context ends.

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
    ) -> None:
        self.folder, self.recorder, self.comm = Path(folder), recorder, comm
        self.layers, self.machine = layers or {}, machine or {}
        self.records = self.error = 0
        self._memory = memory
        self._start = Reading(0, 0, 0)
        self._writing = threading.Lock()
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Trace:
        check_folder(self.folder, self.comm)
        self._start = read_clock(_uncounted(self.comm))
        self.recorder.watch(self._memory)
        if isinstance(self.comm, Metered):
            traffic = self.comm.traffic
            self.recorder.count(lambda: traffic.bytes)
        if self.comm.supervision is not None:
            self._context.enter_context(self.comm.supervision.finishing(self._finish))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)
        self.recorder.watch(None)
        self.recorder.count(None)
        if kind is not None and not issubclass(kind, AgreedError):  # not all ranks are here
            with contextlib.suppress(OSError):  # the error that has ended the context is raised
                self._write(None)
            return
        stop, problem = read_clock(_uncounted(self.comm)), None
        try:
            records, error_of_clock = self._write(stop)
        except OSError as failed:
            problem = unwritable("trace", file_of(self.folder, self.comm.rank), failed)
        agree(self.comm, problem)
        everywhere = self.comm.gather_object((records, error_of_clock))
        self.records = sum(records for records, _ in everywhere)
        self.error = max(error for _, error in everywhere)

    def _finish(self) -> str:
        """Write what is recorded so far, before the run is ended; return the error, if any."""
        try:
            self._write(None)
        except OSError as failed:
            path = file_of(self.folder, self.comm.rank)
            return f"rank {self.comm.rank}: {unwritable('trace', path, failed)}\n"
        return ""

    def _write(self, stop: Reading | None) -> tuple[int, int]:
        """Write this rank's file; return the number of records and the error of the clock."""
        recorder, comm = self.recorder, self.comm
        records, clock = recorder.records(), describe_clock(self._start, stop)
        about = {
            "rank": comm.rank,
            "size": comm.size,
            "host": platform.node(),
            "pid": os.getpid(),
            "lanes": recorder.lanes,
            "command": shlex.join(sys.argv),
            "clock": clock,
            "sent": recorder.sent,
            "layers": dict(self.layers),
            "machine": dict(self.machine),
        }
        with self._writing:  # the run may be ended in the meantime
            write_trace(self.folder, records, recorder.names, about)
        return len(records), int(clock["error"])


def check_folder(folder: str | Path, comm: Communicator, who: str = "trace") -> None:
    """Create the folder of a trace on each host, and test it. Collective: all ranks call it.

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
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
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


def _uncounted(comm: Communicator) -> Communicator:
    """Return the communicator whose calls are neither counted nor recorded."""
    while isinstance(comm, Metered):
        comm = comm.inner
    return comm
