"""Save a checkpoint: at once, or while training continues.

Every rank that can write in the folder writes some of the files, at the end of a step, into the
cache of the system; in the background, a thread flushes them to the disk. A copy in memory, which a
thread would write, would take about as long as that, and then all the work of writing, beside the
steps. The other ranks report the checksums of their files to rank 0 in messages, which it looks for
after each step; then a thread of rank 0 writes the numbers, and renames the folder.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.assembly import TAG, FilePlan, assemble
from pydtnn.training.checkpoint.content import to_json
from pydtnn.training.checkpoint.folder import (
    STATE,
    XXH64,
    begin_checkpoint,
    checkpoint_path,
    complete_checkpoint,
    find_checkpoints,
    partial_path,
    tidy,
)
from pydtnn.training.checkpoint.layout import DataFile
from pydtnn.training.checkpoint.pieces import local_states
from pydtnn.training.checkpoint.planning import Planner
from pydtnn.utils import clock
from pydtnn.utils.collective import collective
from pydtnn.utils.errors import AgreedError, describe
from pydtnn.utils.files import Digest, unwritable
from pydtnn.utils.request import Request

_log = logging.getLogger("pydtnn.training.checkpoint")

THREADS = 4
"""Threads of a rank that write files, of which some wait for the disk."""

CACHED_BYTES = 1 << 18
"""Length of the pieces of which the checksum is computed before they are written, in B."""

RECEIVED_BYTES = 4 << 20
"""Bytes of other ranks in memory, while as many are written."""

MESSAGE_BYTES, SUM_BYTES = 512, 8
"""Length of the error in the report of a rank, in B of UTF-8, and of the checksum of a file."""


def save_checkpoint(
    directory: str | Path,
    trainer: Training,
    *,
    config: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``checkpoint-<step>`` and remove all but the last `keep`.

    Collective: all ranks call it; all that can write in the folder do. Arrays are those of the
    whole network, for any mesh, and no rank gathers them: it sends its parts, block by block, to
    the ranks that write them. The same state gives the same bytes for any number of ranks. If ranks
    train with different parameters, the model's part is their average, and the exchange's part
    contains those of each rank. Running statistics are first made equal on all ranks, which affects
    training: to give the same bytes, runs on several ranks must save at the same steps.

    Parameters
    ----------
    directory : str or Path
        Folder of one run: checkpoints of later steps are removed too.
    trainer : Trainer
        Between two steps.
    config : mapping, optional
        Additional content of `state.json`; JSON values only.
    keep : int

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    AgreedError
        On all ranks, if it cannot be written, for example on a full disk or without permission,
        or if ranks differ that must be equal. Earlier checkpoints are kept.
    """
    saver = Saver(directory, config=config, keep=keep)
    with collective(trainer.comm, "save_checkpoint"):
        error = saver.start(trainer, background=False) or saver.settle(trainer.comm)
    if error is not None:
        raise AgreedError(error)
    return checkpoint_path(directory, trainer.optimizer.iterations)


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes
    ----------
    path : Path
    plan : Plan
    files : dict of str to bytes
        What rank 0 writes besides arrays.
    writer : Writer
        This rank's share.
    thread : Thread or None
        Flushes it to the disk.
    reports : dict of int to (ndarray, Request)
        On rank 0, what the other writers report.
    message, sent : ndarray, Request or None
        This rank's report to rank 0.
    end : Thread or None
        On rank 0, completes the checkpoint.
    complete : bool
        Whether this rank has nothing more to do for it.
    error : str or None
        Why it cannot be written, as far as this rank knows.
    """

    path: Path
    plan: FilePlan
    files: dict[str, bytes]
    writer: Writer
    thread: threading.Thread | None = None
    reports: dict[int, tuple[np.ndarray, Request]] = field(default_factory=dict)
    message: np.ndarray | None = None
    sent: Request | None = None
    end: threading.Thread | None = None
    complete: bool = False
    error: str | None = None


class Saver:
    """Writes the checkpoints of one run.

    Parameters
    ----------
    directory : str or Path
    config : mapping, optional
        See `save_checkpoint`.
    keep : int
        Number of checkpoints that remain.
    on_error : callable, optional
        Called on rank 0 with the reason, as soon as it is known that a checkpoint cannot be
        written.

    Attributes
    ----------
    pending : Pending or None
        The checkpoint that is being written while training continues.
    blocked, written : float
        Seconds for which training stood still for the last checkpoint, and until it was complete on
        this rank.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        keep: int,
        on_error: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.directory = Path(directory)
        self.config = dict(config or {})
        self.keep = keep
        self.on_error = on_error
        self.pending: PendingCheckpoint | None = None
        self.blocked = self.written = 0.0
        self._planner = Planner()
        self._begin = 0.0

    def start(self, trainer: Training, *, background: bool) -> str | None:
        """Begin to write a checkpoint, after `settle`. Collective: all ranks call it.

        Parameters
        ----------
        trainer : Trainer
            Between two steps.
        background : bool
            Whether training may continue while files are flushed to the disk.

        Returns
        -------
        str or None
            Why none can be written, the same on all ranks.

        Raises
        ------
        AgreedError
            On all ranks, if ranks differ that must be equal.
        """
        assert self.pending is None
        self._begin = clock.now()
        with trainer.setup.phase("checkpoint"):
            trainer.compare_ranks()
            with trainer.averaged():
                error = self._write(trainer, background)
        self.blocked = clock.now() - self._begin
        return error

    def _write(self, trainer: Training, background: bool) -> str | None:
        """Copy the pieces of all ranks into files."""
        comm = trainer.comm
        step = trainer.optimizer.iterations
        path = checkpoint_path(self.directory, step)
        own = local_states(trainer)
        try:
            on_rank_0(comm, begin_checkpoint, path)
        except AgreedError as error:
            if comm.rank == 0:
                self.on_error(str(error))
            return str(error)
        plan, about, pieces = self._planner.plan(trainer, own, partial_path(path).is_dir())
        content = {"step": step, "seed": trainer.model.seed, "configuration": self.config} | about
        files = {STATE: to_json(content)} if comm.rank == 0 else {}
        writer = Writer(path, plan.files(comm.rank), later=background)
        pending = self.pending = PendingCheckpoint(path, plan, files, writer)
        if comm.rank == 0:
            for rank in {*plan.writers} - {0}:
                report = np.zeros(_report_bytes(plan, rank), np.uint8)
                pending.reports[rank] = report, comm.irecv(report, rank, TAG + 1)
        assemble(comm, plan, pieces, writer)
        writer.complete()
        if background:
            pending.thread = threading.Thread(target=writer.flush, name="checkpoint", daemon=True)
            pending.thread.start()
        return None

    def poll(self, comm: Communicator) -> None:
        """Continue with the checkpoint that is being written; never waits."""
        pending = self.pending
        if pending is None or pending.complete or _is_active(pending.thread):
            return
        if comm.rank > 0:
            self._report(comm, pending)
            return
        if pending.end is None:
            if all(request.test() for _, request in pending.reports.values()):
                self._end(pending)
        elif not pending.end.is_alive():
            self._close(pending)

    def settle(self, comm: Communicator) -> str | None:
        """Wait until no checkpoint is being written. Collective: all ranks call it.

        Returns
        -------
        str or None
            Why it could not be written, the same on all ranks.
        """
        pending = self.pending
        if pending is None:
            return None
        self._finish(comm, pending)
        self.pending = None
        error: str | None = comm.gather_object(pending.error)[0]
        return error

    def _finish(self, comm: Communicator, pending: PendingCheckpoint) -> None:
        """Wait for all files that this rank or rank 0 writes."""
        if pending.thread is not None:
            pending.thread.join()
        if comm.rank > 0:
            self._report(comm, pending)
            if pending.sent is not None:
                pending.sent.wait()
            return
        if pending.end is None and not pending.complete:
            for _, request in pending.reports.values():
                request.wait()
            self._end(pending)
        if pending.end is not None:
            pending.end.join()
        if not pending.complete:
            self._close(pending)

    def abandon(self, comm: Communicator) -> None:
        """Complete the checkpoint that is being written if that needs no other rank, or drop it.

        For the end of a run by an error; other ranks need not call it.
        """
        pending, self.pending = self.pending, None
        if pending is None or pending.complete:
            return
        if pending.thread is not None:
            pending.thread.join()
        if comm.rank > 0:
            self._report(comm, pending)
        elif pending.end is not None or not pending.reports:
            self._finish(comm, pending)

    def _report(self, comm: Communicator, pending: PendingCheckpoint) -> None:
        """Send the checksums of this rank's files to rank 0, or why there are none."""
        if pending.sent is not None or comm.rank not in pending.plan.writers:
            return
        writer, message = pending.writer, np.zeros(_report_bytes(pending.plan, comm.rank), np.uint8)
        if writer.error is not None:
            text = f"rank {comm.rank}: {writer.error}".encode()[:MESSAGE_BYTES]
            message[: len(text)] = np.frombuffer(text, np.uint8)
        else:
            names = [file.name for file in pending.plan.files(comm.rank)]
            digests = b"".join(bytes.fromhex(writer.sums[name]) for name in names)
            message[MESSAGE_BYTES:] = np.frombuffer(digests, np.uint8)
        pending.error = writer.error
        pending.complete = True
        self.written = clock.now() - self._begin
        pending.message, pending.sent = message, comm.isend(message, 0, TAG + 1)

    def _end(self, pending: PendingCheckpoint) -> None:
        """Complete the checkpoint, as all files with arrays are written: also in a thread."""
        sums, errors = dict(pending.writer.sums), []
        if pending.writer.error is not None:
            errors.append(f"{'rank 0: ' * bool(pending.reports)}{pending.writer.error}")
        for rank, (report, _) in pending.reports.items():
            text = report[:MESSAGE_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")
            if text:
                errors.append(text)
            digests = report[MESSAGE_BYTES:].reshape(-1, SUM_BYTES)
            for file, digest in zip(pending.plan.files(rank), digests, strict=True):
                sums[file.name] = digest.tobytes().hex()
        ordered = {} if errors else {f.name: sums[f.name] for f in pending.plan.layout.files}

        def complete() -> None:
            try:
                if not errors:
                    complete_checkpoint(pending.path, pending.files, ordered, self.keep)
                    return
                tidy(pending.path.parent)
            except Exception as error:  # whatever it is, rank 0 reports it
                errors.append(describe(error))
            pending.error = errors[0]

        if pending.thread is None:
            complete()
            self._close(pending)
            return
        pending.end = threading.Thread(target=complete, name="checkpoint", daemon=True)
        pending.end.start()

    def _close(self, pending: PendingCheckpoint) -> None:
        pending.complete = True
        self.written = clock.now() - self._begin
        if pending.error is None:
            _log.debug("saved %s", pending.path)
        else:
            self.on_error(pending.error)


def last_good(directory: Path) -> str:
    """Return the newest checkpoint in a folder in words, for a warning."""
    try:
        found = find_checkpoints(directory)
    except OSError:
        found = []
    return f"the last good checkpoint is {found[-1]}" if found else "there is no good checkpoint"


class Writer:
    """Writes the files of a rank, several of them at the same time.

    A thread computes the checksum of a piece of a file and writes it while it is in a cache of the
    core. Arrays of training are not copied and must not change before `complete` returns.

    Parameters
    ----------
    path : Path
        The checkpoint.
    files : sequence of DataFile
    later : bool
        Whether files remain in the cache of the system until `flush` is called. They are open until
        then, as NFS flushes a file that is closed.

    Attributes
    ----------
    sums : dict of str to str
        Checksums of the files that are complete.
    error : str or None
        Why the files cannot be written. All that follows is then ignored, as other ranks send it.
    """

    def __init__(self, path: Path, files: Sequence[DataFile], *, later: bool = False) -> None:
        self.path, self.files, self.later = path, files, later
        self.sums: dict[str, str] = {}
        self.error: str | None = None
        self._filled = dict.fromkeys((file.name for file in files), 0)
        self._totals: dict[str, Digest] = {}  # of files that are begun
        self._open: dict[str, FileIO] = {}
        self._blocks: list[np.ndarray] = []  # of a file, until they are given to a thread
        self._received = 0  # their bytes that are no arrays of training
        self._before: Future[None] | None = None  # writes the last blocks that were received
        self._writes: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(THREADS, "checkpoint")

    def room(self, file: DataFile, nbytes: int) -> np.ndarray:
        """Return memory for the next block."""
        self._received += nbytes
        return np.empty(nbytes, np.uint8)

    def put(self, file: DataFile, data: np.ndarray) -> None:
        """Write the next block."""
        self._blocks.append(data)
        self._filled[file.name] += len(data)
        is_complete = self._filled[file.name] == file.size - len(file.header)
        if is_complete or self._received >= RECEIVED_BYTES:
            self._submit(file)

    def complete(self) -> None:
        """Wait until all files are written, to the disk if not `later`."""
        try:
            for file in self.files:
                if file.name not in self._totals:  # without elements
                    self._submit(file)
            for written in self._writes:
                written.result()
        except BaseException:
            for stream in self._open.values():
                stream.close()
            raise
        self._threads.shutdown()
        if not self.later:
            self.flush()  # what is open after an error

    def flush(self) -> None:
        """Flush files to the disk, in any thread."""
        for stream in self._open.values():
            with stream:
                self._try(_flush, stream)

    def _submit(self, file: DataFile) -> None:
        """Have a thread write the blocks that follow in a file."""
        blocks, self._blocks = self._blocks, []
        received, self._received = self._received, 0
        is_first, is_last = (
            file.name not in self._totals,
            self._filled[file.name] + len(file.header) == file.size,
        )
        if is_first:
            self._totals[file.name] = XXH64.new()
            blocks.insert(0, np.frombuffer(file.header, np.uint8))
        if self._before is not None and (received or not is_first):
            self._before.result()  # bounds the memory, and precedes these in the file
        written = self._threads.submit(self._try, self._write, file, blocks, is_first, is_last)
        self._writes.append(written)
        if received:
            self._before = written

    def _write(
        self, file: DataFile, blocks: Sequence[np.ndarray], is_first: bool, is_last: bool
    ) -> None:
        if is_first:
            path = partial_path(self.path) / file.name
            self._open[file.name] = open(path, "xb", buffering=0)  # noqa: SIM115
        stream, total = self._open[file.name], self._totals[file.name]
        for block in blocks:
            for first in range(0, len(block), CACHED_BYTES):
                piece = block[first : first + CACHED_BYTES]
                total.update(piece)
                _write_all(stream, piece)
        if is_last:
            self.sums[file.name] = total.hexdigest()
            if not self.later:
                with self._open.pop(file.name):
                    _flush(stream)

    def _try(self, work: Callable[..., object], *given: object) -> None:
        """Do a part of the work, if all before it was possible."""
        if self.error is not None:
            return
        try:
            work(*given)
        except Exception as error:  # in a thread, nothing else would report it
            if isinstance(error, OSError):
                error = unwritable("checkpoint", self.path, error)
            self.error = self.error or describe(error)


def _write_all(stream: FileIO, data: np.ndarray) -> None:
    while len(data):
        data = data[stream.write(data.data) :]


def _flush(stream: FileIO) -> None:
    os.fsync(stream.fileno())


def _report_bytes(plan: FilePlan, rank: int) -> int:
    return MESSAGE_BYTES + SUM_BYTES * len(plan.files(rank))


def _is_active(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()
