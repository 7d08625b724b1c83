"""Measured choices of this machine, in a file of the user's cache.

There is one file per model of CPU, version of pydtnn and build of its kernels: measurements of
another one are neither used nor overwritten. The first measurement is kept: a later process with
other figures uses the stored ones. Runs that tune at the same time therefore have the same choices,
and a repeated command makes the same choices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydtnn.utils.files import read_file, user_cache, write_file
from pydtnn.utils.machine import cpu_model

VARIABLE = "PYDTNN_CACHE"
"""Environment variable with the path of the folder."""

_UNUSABLE = (
    "measured choices cannot be stored, so another run may choose other algorithms; "
    f"set {VARIABLE} to a writable folder ({{}})"
)

PATIENCE = 5.0
"""Seconds to wait for a process that holds the lock of the file, normally for milliseconds: a
suspended process must not block others."""

_log = logging.getLogger("pydtnn.kernels")


@dataclass(frozen=True)
class Winner:
    """The chosen candidate, and the times of all candidates in s, if known."""

    name: str
    seconds: dict[str, float]


Table = dict[str, dict[int, Winner]]
"""Choices by operation (a string with geometry and dtype), then by batch."""


class AutotunerFile:
    """The choices of this machine, by setting (instruction set and threads).

    A file that cannot be read or written is not an error: choices are then measured again in the
    next run, and the logger "pydtnn.kernels" logs one warning.

    Parameters
    ----------
    machine : str, optional
        Key of the measurements; by default CPU, version and kernels of this process.
    """

    def __init__(self, machine: str | None = None) -> None:
        self._machine = machine
        self._settings: dict[str, Table] | None = None
        self._warned = False
        self._locked_out = False

    @property
    def machine(self) -> str:
        """Key of the measurements."""
        return self._machine or this_machine()

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises
        ------
        RuntimeError
            If the user has no home directory, and neither PYDTNN_CACHE nor XDG_CACHE_HOME is set.
        """
        folder = os.environ.get(VARIABLE)
        name = hashlib.sha256(self.machine.encode()).hexdigest()[:12]
        return (Path(folder).expanduser() if folder else user_cache()) / f"choices-{name}.json"

    def count(self) -> int:
        """Count the stored choices, in all settings."""
        tables = self._read().values()
        return sum(len(batches) for table in tables for batches in table.values())

    def find(
        self, setting: str, operation: str, batch: int, candidates: Sequence[str]
    ) -> Winner | None:
        """Return the choice among exactly these candidates, if there is one."""
        if self._settings is None:
            self._settings = self._read()
        choice = self._settings.get(setting, {}).get(operation, {}).get(batch)
        known = choice and choice.name in candidates and choice.seconds.keys() == {*candidates}
        return choice if known else None

    def add(self, setting: str, operation: str, batch: int, choice: Winner) -> Winner:
        """Store a choice, unless another process has stored one; return the valid one."""
        if self._locked_out:
            return choice
        try:
            with _locked(self.path):
                self._settings = self._read()
                earlier = self.find(setting, operation, batch, list(choice.seconds))
                if earlier:
                    return earlier
                self._settings.setdefault(setting, {}).setdefault(operation, {})[batch] = choice
                content = {"machine": self.machine, "choices": self._settings}
                data = json.dumps(content, indent=1, default=asdict)
                write_file("choices of algorithms", self.path, data.encode())
        except (OSError, RuntimeError) as error:
            self._locked_out = isinstance(error, TimeoutError)  # do not wait for each choice
            self._warn(_UNUSABLE.format(error))
        return choice

    def _read(self) -> dict[str, Table]:
        """Read the file; return the known choices if it cannot be used."""
        known = self._settings or {}
        try:
            content = json.loads(read_file("choices of algorithms", self.path))
            if content["machine"] != self.machine:
                raise ValueError("written for another machine")
            return {name: to_table(table) for name, table in content["choices"].items()}
        except FileNotFoundError:
            return known
        except (OSError, RuntimeError) as error:
            self._warn(_UNUSABLE.format(error))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # or edited
            self._warn(f"{self.path} is damaged; it is replaced, and algorithms measured again")
        return known

    def _warn(self, problem: str) -> None:
        if not self._warned:
            _log.warning("%s", problem)
        self._warned = True


def to_table(content: dict[str, Any]) -> Table:
    """Convert the JSON form of a table.

    Raises
    ------
    ValueError, TypeError, KeyError, AttributeError
        If it is invalid.
    """
    return {
        str(operation): {
            int(batch): Winner(str(choice["name"]), _seconds(choice["seconds"]))
            for batch, choice in batches.items()
        }
        for operation, batches in content.items()
    }


def _seconds(times: Mapping[str, Any]) -> dict[str, float]:
    try:
        return {str(name): float(time) for name, time in times.items()}  # NaN: unknown
    except OverflowError as error:  # of a whole number above all floats
        raise ValueError(str(error)) from error


@cache
def this_machine() -> str:
    """Return the CPU, the version, and a digest of the compiled kernels as a key."""
    from pydtnn import __version__
    from pydtnn.kernels.cpu import _conv

    kernels = hashlib.sha256(Path(_conv.__file__).read_bytes()).hexdigest()[:12]
    return f"{cpu_model()}, pydtnn {__version__}, kernels {kernels}"


def _open_now(path: str, flags: int) -> int:
    """Open a file; an error where a named pipe would block."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file against changes by other processes, if the file system supports locks.

    Raises
    ------
    TimeoutError
        If another process holds the lock for more than `PATIENCE` seconds.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "a", opener=_open_now) as file:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{file.name} has been locked by another process for {PATIENCE:g} s"
                    ) from None
                time.sleep(0.01)
                continue
            except OSError:  # not supported by some network file systems
                pass
            break
        yield
