"""The file of a study, to which any number of processes append, and locks of processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydtnn.tools.search.dimension import WHO
from pydtnn.utils.files import MAX_TEXT_B, open_file

LOCKED = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a file that is locked is opened: nothing is created where a link leads."""


class FileLock:
    """A lock of processes, which the system releases when one ends.

    Optuna's own lock is a link that remains when its process is killed: others wait for 30 s.
    Without effect on file systems that do not support it.

    Parameters
    ----------
    path : Path
        The file that is locked, which is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> None:
        self._file = os.open(self._path, LOCKED, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Journal:
    """A journal for the storage of Optuna: a file of JSON lines, as its `JournalFileBackend`.

    Optuna's class waits for the disk after each of the 17 lines of a trial, about 10 ms each.

    Parameters
    ----------
    path : Path
        The file, which is created. A line that a host which has failed did not finish is cut:
        Optuna could not read on.
    lock : FileLock
        Held while lines are appended.

    Raises
    ------
    OSError, ValueError
        If it is another kind of file, or a link that leaves its folder.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        from optuna.storages.journal import JournalFileBackend

        self._path, self._lock = path, lock
        if os.path.lexists(path):
            open_file(WHO, path, MAX_TEXT_B, folder=path.parent).close()
        with lock, open(path, "a+b") as file:
            file.seek(0)
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
        self._reader = JournalFileBackend(str(path))

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Yield the lines from a number on."""
        return self._reader.read_logs(log_number_from)

    def append_logs(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, which other processes may read at once."""
        text = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs)
        with self._lock, open(self._path, "ab") as file:
            file.write(text.encode())

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Context after which the lines are on the disk."""
        yield
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
