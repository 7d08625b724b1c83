"""Completion of command lines, in the shells that are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydtnn.__main__ import COMMANDS
from pydtnn.cli.completion import SHELLS, main, parser_of, script, table
from pydtnn.cli.config import TrainConfig, flags
from tests.each import each

TIMEOUT_S = 60
"""Of a shell; each answers within a fraction of a second on an idle machine."""

QUIET_S = 0.15
"""Time without output after which a shell waits for keys."""

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}

PREPARE = {
    "bash": "bind 'set enable-bracketed-paste off'",
    "zsh": "autoload -Uz compinit; compinit -u -D; zstyle ':completion:*' insert-tab false",
    "fish": "function fish_prompt; end",
}

PROGRAMS = ("pydtnn", "pydtnn-train", "python", "mpirun")

STUB = {
    "fish": 'function {0}; echo "GOT[$argv]"; end',
    "bash": '{0}() {{ echo "GOT[$*]"; }}',
    "zsh": '{0}() {{ echo "GOT[$*]"; }}',
}
"""Programs are replaced by functions that print their arguments."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user, with the script of each shell and some runs."""
    folder = tmp_path_factory.mktemp("user")
    for shell in SHELLS:
        (folder / f"script.{shell}").write_text(script(shell, COMMANDS))
    (folder / "runs" / "mlp-digits-1").mkdir(parents=True)
    (folder / "runs" / "mlp-digits-1" / "run.json").write_text("{}")
    (folder / "runs" / "another").mkdir()
    (folder / "network.py").write_text("")
    return folder


@pytest.fixture(scope="module", params=SHELLS)
def terminal(request: pytest.FixtureRequest, scripts: Path) -> Iterator[int]:
    """The descriptor of a terminal in which a shell with the script runs."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    process, terminal = pty.fork()
    if not process:
        os.chdir(scripts)
        environment = {"PATH": os.environ["PATH"], "HOME": str(scripts), "TERM": "dumb"}
        os.execvpe(shell, START[shell], environment)
    stubs = "; ".join(STUB[shell].format(name) for name in PROGRAMS)
    try:
        os.write(terminal, f"{PREPARE[shell]}; source script.{shell}; {stubs}\r".encode())
        type_keys(terminal, "echo READY''NOW\r", "READYNOW")
        yield terminal
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def type_keys(terminal: int, keys: str, pattern: str) -> str:
    """Wait until a pattern is printed, and then until nothing more is; return what it matched."""
    os.write(terminal, keys.encode())
    text, end, found = "", time.monotonic() + TIMEOUT_S, None
    while time.monotonic() < end:
        if select.select([terminal], [], [], QUIET_S)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
        elif found := re.search(pattern, re.sub(r"\r|\n", "", text)):
            return found[found.lastindex or 0].strip()
    pytest.fail(f"the shell has printed {text!r}")


@each(
    ("line", "arguments"),
    [
        ("pydtnn interch", "interchange"),
        ("pydtnn train --optimizer lam", "train --optimizer lamb"),
        ("pydtnn-train --optimizer=lam", "--optimizer=lamb"),
        ("pydtnn-train --print-c", "--print-config"),
        ("pydtnn-train --no-over", "--no-overlap"),
        ("pydtnn-train --augment crop:4,fli", "--augment crop:4,flip"),
        ("pydtnn-train --model netw", "--model network.py"),
        ("pydtnn-train --device cu", "--device cuda"),
        ("pydtnn-train --resume ", "--resume runs/mlp-digits-1"),
        ("pydtnn trace export runs --to para", "trace export runs --to paraver"),
        ("pydtnn runs --sort sta", "runs --sort sta"),  # started or state
        ("pydtnn runs --sort sec", "runs --sort seconds"),
        ("pydtnn oracle --platform lap", "oracle --platform laptop"),
        ("python -m pydtnn.train --dataset dig", "-m pydtnn.train --dataset digits"),
        ("python -m pydtnn orac", "-m pydtnn oracle"),
        ("python -m pydtnn.orac", "-m pydtnn.oracle"),
        (
            "mpirun -np 2 python -m pydtnn.train --scheme goss",
            "-np 2 python -m pydtnn.train --scheme gossip",
        ),
        ("python netw", "network.py"),
    ],
)
def test_what_is_typed_is_completed(line: str, arguments: str, terminal: int) -> None:
    type_keys(terminal, f"{line}\t", re.escape(line.split()[0]))
    assert type_keys(terminal, "\r", r"GOT\[([^\]]*)\]") == arguments


def test_a_completion_starts_no_program(scripts: Path) -> None:
    """So it takes a few milliseconds, whatever pydtnn imports."""
    code = """
        source script.bash
        COMP_LINE='mpirun -np 2 python -m pydtnn.train --model resnet1' COMP_POINT=${#COMP_LINE}
        PATH= _pydtnn mpirun 2>/dev/null
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, cwd=scripts, check=True
    )
    assert {"resnet18", "resnet101"} <= {*done.stdout.split()}


def test_the_table_has_every_command_and_every_option_of_training() -> None:
    rows = [line.split("|") for line in table(COMMANDS)]
    assert all(len(row) == 5 for row in rows)
    assert {row[1] for row in rows if row[0] == ""} == {*COMMANDS}
    own = {row[1] for row in rows if row[0] == "train"}
    assert {option.label for option in flags(TrainConfig).values()} <= own


@each("command", COMMANDS)
def test_each_command_has_a_parser_of_its_name(command: str) -> None:
    assert parser_of(command).prog in (f"python -m pydtnn.{command}", f"python -m pydtnn {command}")


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bash"]) == 0
    assert capsys.readouterr().out == script("bash", COMMANDS)
    assert main(["tcsh"]) == 1
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_the_command_is_one_of_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pydtnn", "completion", "fish"], capture_output=True, check=True
    )
    assert b"complete -c $program" in done.stdout
