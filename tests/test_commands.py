"""``python -m pydtnn`` lists every module that is run, and runs each of them."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import pydtnn
from pydtnn.__main__ import COMMANDS, ELSEWHERE, main
from tests.each import each

ROOT = Path(pydtnn.__file__).parent

pytestmark = pytest.mark.tools


def test_every_command_is_listed():
    run = 'if __name__ == "__main__":'
    files = {f.relative_to(ROOT) for f in ROOT.rglob("*.py") if run in f.read_text()}
    names = {".".join(f.with_suffix("").parts).removesuffix(".__main__") for f in files}
    monitor = "comm.monitor.process"  # not for users
    assert names - {"__main__", monitor} == {
        ELSEWHERE.get(name, f"tools.{name}") for name in COMMANDS
    }


def test_the_list_is_printed():
    found = subprocess.run([sys.executable, "-m", "pydtnn"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()[2:]] == [*COMMANDS]


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["tran", "--model", "mlp"]) == 1
    assert "did you mean 'train'" in capsys.readouterr().err


@each("command", COMMANDS)
def test_a_command_is_run_with_its_arguments(command, capsys):
    try:
        status = main([command, "--help"])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 0
    assert f"python -m pydtnn{'.' if command == 'train' else ' '}{command}" in (
        capsys.readouterr().out
    )


@each("command", COMMANDS)
def test_a_help_page_fits_on_a_screen_unless_it_is_the_complete_one(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 50


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pydtnn {pydtnn.__version__}\n"
