"""The user's terminal, also where a launcher such as mpirun connects the ranks by pipes."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

_log = logging.getLogger("pydtnn.run")

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")
"""Programs that start ranks and copy their output to their own."""

PROXIES = ("hydra_pmi_proxy", "prted", "orted")
"""Processes of launchers that start the ranks of a host."""

REDIRECTING = ("prepend", "outfile", "output", "tag-output", "timestamp", "xterm")
"""Options of launchers that label the lines of ranks or write them elsewhere, without hyphens."""

DEFAULT_WIDTH = 80


class Lasting:
    """A stream whose errors do not end a run: what cannot be written is lost, after one warning.

    Characters that its encoding does not have are escaped. A pipe that is closed is an error.

    Parameters
    ----------
    stream : text stream
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._warned = stream, False

    def write(self, text: str) -> int:
        """Write; return the number of characters."""
        self._try(self._stream.write, encodable(text, self._stream))
        return len(text)

    def flush(self) -> bool:
        """Flush; return whether it was possible."""
        return self._try(self._stream.flush)

    def close(self) -> None:
        """Close."""
        self._try(self._stream.close)

    def _try(self, call: Callable[..., object], *args: str) -> bool:
        try:
            call(*args)
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                name, reason = "the standard output", (error.strerror or str(error)).lower()
                with contextlib.suppress(OSError, ValueError):
                    name = os.readlink(f"/proc/self/fd/{self._stream.fileno()}")
                _log.warning("%s cannot be written: %s; the run continues", name, reason)
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def encodable(text: str, stream: TextIO) -> str:
    """Escape the characters that the encoding of a stream does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class _Process(NamedTuple):
    """What Linux tells of a process: see proc_pid_stat(5)."""

    name: str
    parent: int
    group: int
    terminal: int
    foreground: int


def terminal_of(stream: TextIO) -> TextIO | None:
    """Return the user's terminal if it displays `stream`.

    A rank writes into a pipe (or a terminal of the launcher) that the launcher copies to its own
    output. If that is the terminal of the launcher, and the launcher runs in the foreground, the
    terminal is opened. This requires Linux and a launcher on the host of this rank.

    Returns
    -------
    text stream or None
        `stream` itself, or the terminal as a new stream, which the caller closes; None if the
        output is redirected into a file or pipe, or the terminal is unknown.
    """
    try:
        number = os.getppid()
        process = _read(number)
        if process is None or process.name not in (*LAUNCHERS, *PROXIES):
            return stream if stream.isatty() else None
        if not _is_pipe_or_terminal(stream):
            return None
        number = launcher_of(number)
        process = _read(number)
        if process is None or _redirects(number):
            return None
        path = Path(f"/proc/{number}/fd/1")
        status = path.stat()
        same = stat.S_ISCHR(status.st_mode) and status.st_rdev == process.terminal
        if not same or process.group != process.foreground:
            return None
        # A process without a terminal would acquire this one, and its signals, without O_NOCTTY.
        descriptor = os.open(path.readlink(), os.O_WRONLY | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    return open(descriptor, "w", encoding=getattr(stream, "encoding", None), errors="replace")


def is_proxy(number: int) -> bool:
    """Return whether a process is one of a launcher that starts the ranks of a host."""
    process = _read(number)
    return process is not None and process.name in PROXIES


def launcher_of(number: int) -> int:
    """Return the launcher, such as mpirun, that has started a rank on its own host; 0 for none.

    Parameters
    ----------
    number : int
        The parent process of the rank.
    """
    process = _read(number)
    while process is not None and process.name in PROXIES:
        number = process.parent
        process = _read(number)
    return number if process is not None and process.name in LAUNCHERS else 0


def width_of(stream: TextIO) -> int:
    """Return the columns of a terminal: COLUMNS if it is set, or its size, or 80."""
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    with contextlib.suppress(OSError, ValueError):  # not a file of the system
        columns = columns or os.get_terminal_size(stream.fileno()).columns
    return columns or DEFAULT_WIDTH


def _is_pipe_or_terminal(stream: TextIO) -> bool:
    mode = os.fstat(stream.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()


def _read(number: int) -> _Process | None:
    """Return the entries of a process; None if there is no such process, or no Linux."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    _, parent, group, _, terminal, foreground = rest.split()[:6]
    device = int(terminal)  # minor number in bits 31 to 20 and 7 to 0, major in 15 to 8
    minor = device & 0xFF | device >> 12 & 0xFFF00
    return _Process(
        name, int(parent), int(group), os.makedev(device >> 8 & 0xFFF, minor), int(foreground)
    )


def _redirects(number: int) -> bool:
    """Return whether a launcher's options change the output of ranks."""
    arguments = Path(f"/proc/{number}/cmdline").read_text().split("\0")[1:]
    program = Path(sys.executable).name
    for argument in arguments:
        if Path(argument).name in (program, "python", "python3"):
            return False
        if argument == "-l" or (
            argument.startswith("-") and argument.lstrip("-").startswith(REDIRECTING)
        ):
            return True
    return False
