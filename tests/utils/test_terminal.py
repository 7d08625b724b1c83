"""The terminal of a process, and of the launcher that started it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import pty
import struct
import sys
import termios

import pytest

from pydtnn.utils.terminal import Lasting, encodable, terminal_of, width_of
from tests.each import each
from tests.launch import MPICH, OPENMPI, ROOT, is_openmpi, mpiexec, why_not

SHOW = (
    "import os, sys; from pydtnn.utils.terminal import terminal_of, width_of; "
    "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK', '0')); "
    "found = terminal_of(sys.stdout); "
    "rank == '0' and sys.stderr.write(f'terminal {found is not None} "
    "own {found is sys.stdout} width {found and width_of(found)}')"
)


def on_terminal(command: str) -> str:
    """Run a shell command in the foreground of a terminal of 70 columns; return what it shows."""
    environment = {**(OPENMPI if is_openmpi() else MPICH), **os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 70, 0, 0))
        os.execve("/bin/sh", ["sh", "-c", command], environment)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is closed when the command ends
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    os.waitpid(child, 0)
    return shown.decode()


PYTHON = f'{sys.executable} -c "{SHOW}"'


@each(
    ("command", "found"),
    [
        (PYTHON, "terminal True own True width 70"),
        (f"{PYTHON} > /dev/null", "terminal False"),
        (f"{PYTHON} | cat", "terminal False"),
    ],
)
def test_the_terminal_is_found_unless_the_output_is_redirected(command, found):
    assert found in on_terminal(command)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.skipif(sys.platform != "linux", reason="requires /proc")
@each(
    ("template", "found"),
    [
        ("{mpirun} -n 2 {python}", "terminal True own False width 70"),
        ("{mpirun} -n 2 {python} | cat", "terminal False"),
        ("{mpirun} -n 2 sh -c '{python} > /dev/null; true'", "terminal False"),
    ],
)
def test_the_terminal_of_the_launcher_is_found_unless_its_output_is_redirected(
    template, found, tmp_path
):
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    command = template.format(mpirun=mpiexec(), python=f"{sys.executable} {script}")
    assert found in on_terminal(command)


@pytest.mark.skipif(bool(why_not()) or is_openmpi(), reason="an option of MPICH")
def test_lines_that_the_launcher_labels_are_not_written_to_its_terminal():
    assert "terminal False" in on_terminal(f"{mpiexec()} -prepend-rank -n 1 {PYTHON}")


def test_a_stream_without_a_file_has_the_usual_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width_of(io.StringIO()) == 80
    monkeypatch.setenv("COLUMNS", "33")
    assert width_of(io.StringIO()) == 33
    monkeypatch.setenv("COLUMNS", "wide")
    assert width_of(io.StringIO()) == 80
    assert terminal_of(io.StringIO()) is None


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
