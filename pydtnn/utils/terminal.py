"""Streams of output: their errors, encodings and width, and the processes of launchers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

_log = logging.getLogger("pydtnn.run")

PROXIES = ("hydra_pmi_proxy", "prted", "orted")
"""Processes of launchers that start the ranks of a host."""

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


def is_proxy(number: int) -> bool:
    """Return whether a process is one of a launcher that starts the ranks of a host, on Linux."""
    try:
        return Path(f"/proc/{number}/comm").read_text().rstrip("\n") in PROXIES
    except OSError:
        return False


def width_of(stream: TextIO) -> int:
    """Return the columns of a terminal: COLUMNS if it is set, or its size, or 80."""
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    with contextlib.suppress(OSError, ValueError):  # not a file of the system
        columns = columns or os.get_terminal_size(stream.fileno()).columns
    return columns or DEFAULT_WIDTH
