"""Commands whose output is hostile, is read by nobody any more, or cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pydtnn.utils.command import printing

DRAW = ["pydtnn", "comm", "draw", "ring", "-np", "16"]
"""Prints more than a pipe holds."""

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def test_nothing_that_a_command_prints_is_executed_by_a_terminal(capsys):
    before = sys.stdout
    with printing():
        print("a\x1b]0;title\x07 \x9b2J b\rc \u202e é", "next", sep="\n")
        assert not sys.stdout.isatty()
        assert sys.stdout.encoding == before.encoding
    assert sys.stdout is before
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07 \\x9b2J b\\rc \\u202e é\nnext\n"


def start(command: list[str], stdout: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", *command]
    return subprocess.Popen(
        arguments, stdout=stdout, stderr=subprocess.PIPE, text=True, env=BUFFERED
    )


@pytest.mark.tools
@pytest.mark.parametrize(
    "command", [DRAW, pytest.param(["pydtnn.train", "--help"], marks=pytest.mark.long)], ids=str
)
def test_a_command_ends_in_silence_where_its_reader_has_gone(command):
    with start(command, subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    # argparse takes no notice where its help is longer than the buffer.
    assert process.returncode in ({0} if "--help" in command else set()) | {128 + signal.SIGPIPE}


@pytest.mark.tools
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_one_sentence():
    with open("/dev/full", "w") as full, start(DRAW, full.fileno()) as process:
        told = process.stderr.read()
    assert told == "pydtnn comm: the standard output cannot be written: no space left on device\n"
    assert process.returncode == 1


@pytest.mark.tools
def test_a_command_without_an_output_ends_in_order():
    command = f"{sys.executable} -m pydtnn.comm list >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
