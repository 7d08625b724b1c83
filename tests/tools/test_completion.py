"""Completion of command lines."""

import shutil
import subprocess

import pytest

from pydtnn.__main__ import COMMANDS
from pydtnn.cli.config import TrainConfig, flags
from pydtnn.tools.completion import SHELLS, main, parser_of, script, table
from tests.each import each

COMPLETE = """
source script.bash
while IFS= read -r COMP_LINE; do
  COMP_POINT=${#COMP_LINE} COMPREPLY=()
  PATH= _pydtnn "${COMP_LINE%% *}" 2>/dev/null
  printf '%s\\n' "${COMPREPLY[*]}"
done
"""
"""No program can be started: a completion takes milliseconds, whatever pydtnn imports."""

LINES = {
    "pydtnn interch": "interchange",
    "pydtnn train --optimizer lam": "lamb",
    "pydtnn-train --optimizer=lam": "lamb",
    "pydtnn-train --no-fus": "--no-fusion",
    "pydtnn-train --augment crop:4,fli": "4,flip",  # a colon begins a word
    "pydtnn-train --model netw": "network.py",
    "pydtnn-train --model resnet1": "resnet110 resnet1202 resnet18 resnet101 resnet152",
    "pydtnn-train --resume ": "runs/mlp-digits-1",
    "pydtnn trace export runs --to para": "paraver",
    "pydtnn runs --sort sec": "seconds",
    "pydtnn oracle --platform lap": "laptop",
    "python -m pydtnn.train --dataset dig": "digits",
    "python -m pydtnn orac": "oracle",
    "python -m pydtnn.orac": "pydtnn.oracle",
    "mpirun -np 2 python -m pydtnn.train --scheme goss": "gossip",
}


def test_what_is_typed_is_completed(tmp_path):
    (tmp_path / "script.bash").write_text(script("bash", COMMANDS))
    (tmp_path / "runs" / "mlp-digits-1").mkdir(parents=True)
    (tmp_path / "runs" / "mlp-digits-1" / "run.json").write_text("{}")
    (tmp_path / "runs" / "another").mkdir()
    (tmp_path / "network.py").write_text("")
    given = {"input": "\n".join([*LINES, ""]), "text": True, "cwd": tmp_path, "check": True}
    done = subprocess.run(["bash", "-c", COMPLETE], capture_output=True, **given)
    assert dict(zip(LINES, done.stdout.splitlines(), strict=True)) == LINES


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_can_be_parsed_by_its_shell(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell, COMMANDS))
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_the_table_has_every_command_and_every_option_of_training():
    rows = [line.split("|") for line in table(COMMANDS)]
    assert all(len(row) == 5 for row in rows)
    assert {row[1] for row in rows if row[0] == ""} == {*COMMANDS}
    own = {row[1] for row in rows if row[0] == "train"}
    assert {flag.label for flag in flags(TrainConfig).values() if not flag.owner} <= own


@each("command", COMMANDS)
def test_each_command_has_a_parser_of_its_name(command):
    assert parser_of(command).prog in (f"python -m pydtnn.{command}", f"python -m pydtnn {command}")


def test_the_command_prints_the_script(capsys):
    assert main(["bash"]) == 0
    assert capsys.readouterr().out == script("bash", COMMANDS)
    assert main(["tcsh"]) == 1
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
