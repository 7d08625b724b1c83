"""Save a checkpoint: at once, or while training continues.

Every rank that can write in the folder writes some of the files. In the background, a rank copies
what it writes at the end of a step, and a thread writes the copy. The other ranks report the
checksums of their files to rank 0 in messages, which it looks for after each step; then a thread of
rank 0 writes the numbers, and renames the folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.assembly import BLOCK_BYTES, TAG, Plan, assemble
from pydtnn.training.checkpoint.content import to_json
from pydtnn.training.checkpoint.folder import (
    STATE,
    Retention,
    begin_checkpoint,
    checkpoint_path,
    complete_checkpoint,
    find_checkpoints,
    partial_path,
    tidy,
)
from pydtnn.training.checkpoint.layout import DataFile
from pydtnn.training.checkpoint.pieces import StateOfRank
from pydtnn.training.checkpoint.planning import Planner
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, describe
from pydtnn.utils.files import unwritable
from pydtnn.utils.request import Request

_log = logging.getLogger("pydtnn.training.checkpoint")

MESSAGE_BYTES = 512
"""Length of the error in the report of a rank, in B of UTF-8."""


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
    saver = Saver(directory, config=config, retention=Retention(keep))
    error = saver.start(trainer, background=False) or saver.settle(trainer.comm)
    if error is not None:
        raise AgreedError(error)
    return checkpoint_path(directory, trainer.optimizer.iterations)


@dataclass
class Pending:
    """A checkpoint that is being written.

    Attributes
    ----------
    path : Path
    plan : Plan
    files : dict of str to bytes
        What rank 0 writes besides arrays.
    writer : FileWriter or Copy
        This rank's share.
    thread : Thread or None
        Writes the copy.
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
    plan: Plan
    files: dict[str, bytes]
    writer: FileWriter | Copy
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
    retention : Retention
    check : callable, optional
        Called on rank 0 before the first file is written; may raise OSError.
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
        retention: Retention,
        check: Callable[[], object] | None = None,
        on_error: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.directory = Path(directory)
        self.config = dict(config or {})
        self.retention = retention
        self.check = check
        self.on_error = on_error
        self.pending: Pending | None = None
        self.blocked = self.written = 0.0
        self._state, self._planner = StateOfRank(), Planner()
        self._memory: dict[str, np.ndarray] = {}
        self._begin = 0.0
        self._steps: deque[int] = deque(maxlen=1)
        self._intervals: deque[int] = deque(maxlen=3)

    def start(self, trainer: Training, *, background: bool) -> str | None:
        """Begin to write a checkpoint, after `settle`. Collective: all ranks call it.

        Parameters
        ----------
        trainer : Trainer
            Between two steps.
        background : bool
            Whether training may continue while a copy is written. Otherwise no copy is made.

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
                error = self._copy(trainer, background)
        self.blocked = clock.now() - self._begin
        return error

    def _begin_folder(self, path: Path) -> None:
        if self.check is not None:
            self.check()
        begin_checkpoint(path)

    def _copy(self, trainer: Training, background: bool) -> str | None:
        """Copy the pieces of all ranks into files, or into memory that a thread writes."""
        comm = trainer.comm
        step = trainer.optimizer.iterations
        path = checkpoint_path(self.directory, step)
        if self._steps and step > self._steps[-1]:
            self._intervals.append(step - self._steps[-1])
        self._steps.append(step)
        own = self._state.of(trainer)
        try:
            on_rank_0(comm, self._begin_folder, path)
        except AgreedError as error:
            if comm.rank == 0:
                self.on_error(str(error))
            return str(error)
        plan, about, pieces = self._planner.plan(trainer, own, partial_path(path).is_dir())
        about = {
            "step": step,
            "seed": trainer.model.seed,
            "configuration": self.config,
            **about,
        }
        files = {STATE: to_json(about)} if comm.rank == 0 else {}
        mine = plan.files(comm.rank)
        writer: FileWriter | Copy = FileWriter(path)
        if background:
            writer = Copy(path, mine, self._memory)
        pending = self.pending = Pending(path, plan, files, writer)
        if comm.rank == 0:
            for rank in {*plan.writers} - {0}:
                report = np.zeros(_report_bytes(plan, rank), np.uint8)
                pending.reports[rank] = report, comm.irecv(report, rank, TAG + 1)
        assemble(comm, plan, pieces, writer)
        if isinstance(writer, Copy):
            pending.thread = threading.Thread(target=writer.write, name="checkpoint", daemon=True)
            pending.thread.start()
        else:
            writer.close()
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

    def _finish(self, comm: Communicator, pending: Pending) -> None:
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

    def _report(self, comm: Communicator, pending: Pending) -> None:
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

    def _end(self, pending: Pending) -> None:
        """Complete the checkpoint, as all files with arrays are written: also in a thread."""
        sums, errors = dict(pending.writer.sums), []
        if pending.writer.error is not None:
            errors.append(f"{'rank 0: ' * bool(pending.reports)}{pending.writer.error}")
        for rank, (report, _) in pending.reports.items():
            text = report[:MESSAGE_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")
            if text:
                errors.append(text)
            digests = report[MESSAGE_BYTES:].reshape(-1, 32)
            for file, digest in zip(pending.plan.files(rank), digests, strict=True):
                sums[file.name] = digest.tobytes().hex()
        usual = sorted(self._intervals)[len(self._intervals) // 2 :][:1]
        interval = usual[0] if usual else None
        ordered = {} if errors else {f.name: sums[f.name] for f in pending.plan.layout.files}

        def complete() -> None:
            try:
                if not errors:
                    files, kept = pending.files, self.retention
                    complete_checkpoint(pending.path, files, ordered, kept, interval)
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

    def _close(self, pending: Pending) -> None:
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


class FileWriter:
    """Writes the files of a rank block by block, as they are assembled.

    Parameters
    ----------
    path : Path
        The checkpoint.

    Attributes
    ----------
    sums : dict of str to str
        Checksums of the files that are complete.
    error : str or None
        Why the files cannot be written. All that follows is then ignored, as other ranks send it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: dict[str, str] = {}
        self.error: str | None = None
        self._scratch = np.empty(0, np.uint8)
        self._open: OpenFile | None = None

    def room(self, file: DataFile, nbytes: int) -> np.ndarray:
        """Return memory for the next block."""
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(max(nbytes, BLOCK_BYTES), np.uint8)
        return self._scratch[:nbytes]

    def put(self, file: DataFile, data: np.ndarray) -> None:
        """Write the next block."""
        self._try(self._write, file, data)

    def close(self) -> None:
        """Complete the last file."""
        self._try(self._complete)

    def _write(self, file: DataFile, data: np.ndarray) -> None:
        if self._open is None or self._open.file is not file:
            self._complete()
            self._open = OpenFile(self.path, file)
        self._open.write(data)

    def _complete(self) -> None:
        if self._open is not None:
            self.sums[self._open.file.name] = self._open.complete()
            self._open = None

    def _try(self, action: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            self.error = _reason(self.path, action, *args)
            if self.error is not None and self._open is not None:
                self._open.close()


class OpenFile:
    """A file of a checkpoint that is written from its beginning to its end."""

    def __init__(self, path: Path, file: DataFile) -> None:
        self.file = file
        self._sum = hashlib.sha256()
        self._stream = open(partial_path(path) / file.name, "xb", buffering=0)  # noqa: SIM115
        self.write(np.frombuffer(file.header, np.uint8))

    def write(self, data: np.ndarray) -> None:
        """Append bytes."""
        view = data.data
        while view:
            written = self._stream.write(view[: 64 << 20])
            self._sum.update(view[:written])
            view = view[written:]

    def complete(self) -> str:
        """Flush the file to disk, and return its checksum."""
        with self._stream:
            os.fsync(self._stream.fileno())
        return self._sum.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class Copy:
    """A copy of the files of a rank, which a thread writes.

    Parameters
    ----------
    path : Path
        The checkpoint.
    files : sequence of DataFile
    memory : dict of str to ndarray
        The copies of the checkpoint before, whose memory is used again.

    Attributes
    ----------
    sums, error
        See `FileWriter`; final when the thread has ended.
    """

    def __init__(
        self, path: Path, files: Sequence[DataFile], memory: dict[str, np.ndarray]
    ) -> None:
        self.path = path
        self.files = files
        self.sums: dict[str, str] = {}
        self.error: str | None = None
        self._memory = memory
        self._filled = dict.fromkeys((file.name for file in files), 0)
        sizes = {file.name: file.size - len(file.header) for file in files}
        for name in [name for name in memory if sizes.get(name) != len(memory[name])]:
            del memory[name]
        for name, size in sizes.items():
            if name not in memory:
                memory[name] = np.empty(size, np.uint8)

    def room(self, file: DataFile, nbytes: int) -> np.ndarray:
        """Return memory for the next block."""
        first = self._filled[file.name]
        return self._memory[file.name][first : first + nbytes]

    def put(self, file: DataFile, data: np.ndarray) -> None:
        """Count the block, which is in place."""
        self._filled[file.name] += len(data)

    def write(self) -> None:
        """Write all files; called in a thread."""
        for file in self.files:
            if self.error is None:
                self.error = _reason(self.path, self._write, file)

    def _write(self, file: DataFile) -> None:
        out = OpenFile(self.path, file)
        try:
            out.write(self._memory[file.name])
            self.sums[file.name] = out.complete()
        finally:
            out.close()


def _reason(path: Path, action: Callable[..., None], *args: Any) -> str | None:
    """Call an action; return why it has failed."""
    try:
        action(*args)
    except OSError as error:
        return describe(unwritable("checkpoint", path, error))
    except Exception as error:  # in a thread, nothing else would report it
        return describe(error)
    return None


def _report_bytes(plan: Plan, rank: int) -> int:
    return MESSAGE_BYTES + 32 * len(plan.files(rank))


def _is_active(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()
