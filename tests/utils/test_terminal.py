"""Streams of output: errors, encodings and width."""

from __future__ import annotations

import errno
import io
import os

import pytest

from pydtnn.utils.terminal import Lasting, encodable, width_of


def test_a_stream_without_a_file_has_the_usual_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width_of(io.StringIO()) == 80
    monkeypatch.setenv("COLUMNS", "33")
    assert width_of(io.StringIO()) == 33
    monkeypatch.setenv("COLUMNS", "wide")
    assert width_of(io.StringIO()) == 80


class Disk(io.RawIOBase):
    """A file on a disk that may be full."""

    def __init__(self) -> None:
        self.error, self.data = 0, b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.data += bytes(data)
        return len(data)


def test_a_stream_lasts_while_its_disk_is_full_and_continues(caplog):
    disk = Disk()
    with io.TextIOWrapper(io.BufferedWriter(disk), encoding="utf-8") as inner:
        stream = Lasting(inner)
        for number in range(3000):
            disk.error = errno.ENOSPC * (1000 < number < 2000)
            print(f"line {number}", file=stream, flush=True)  # type: ignore[call-overload]
        assert stream.flush()
    lines = disk.data.decode().splitlines()
    assert lines[:1000] == [f"line {number}" for number in range(1000)]
    assert lines[-1] == "line 2999"
    (record,) = caplog.records
    assert record.getMessage() == (
        "the standard output cannot be written: no space left on device; the run continues"
    )
    closed = Disk()
    with io.TextIOWrapper(io.BufferedWriter(closed)) as inner:
        closed.error = errno.EPIPE
        Lasting(inner).write("x")
        with pytest.raises(BrokenPipeError):
            Lasting(inner).flush()
        closed.error = 0


def test_characters_that_an_encoding_does_not_have_are_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Lasting(stream).write("\u00e9t\u00e9 \udcff")
    stream.seek(0)
    assert stream.read() == "\\xe9t\\xe9 \\udcff"
    assert encodable("\u00e9 \udcff", io.StringIO()) == "\u00e9 \\udcff"
