"""``python -m pydtnn launch``: a run that fails is started again and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pydtnn.tools.child import ProgramEnd
from pydtnn.tools.launch import Launch, failed, find_options, main
from pydtnn.training.checkpoint import find_checkpoints
from tests.each import each
from tests.launch import MPICH, is_openmpi, mpiexec, run, why_not
from tests.ranks import ranks_of, wait_for
from tests.small_run import HELD, TINY, TRAIN, processes_in

EXACT = ["--exact", "--tuning=fixed", "--shards=4", "--checkpoint-steps=4", "--save=net.pydtnn"]

mpi = pytest.mark.skipif(
    bool(why_not()) or is_openmpi(), reason=why_not() or "a killed rank ends MPICH's job"
)


def script(folder: Path, text: str) -> list[str]:
    """Return a command that runs a program in the place of `pydtnn.train`."""
    file = folder / "pydtnn-train"
    file.write_text(f"#!{sys.executable}\nimport os, sys, time, pathlib\n{text}\n")
    file.chmod(0o755)
    return [str(file)]


COUNTED = """
attempts = pathlib.Path("attempts")
done = attempts.read_text().splitlines() if attempts.exists() else []
attempts.write_text("".join(line + "\\n" for line in [*done, " ".join(sys.argv[1:])]))
"""


def attempts(folder: Path) -> list[str]:
    return (folder / "attempts").read_text().splitlines()


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_options_of_train_are_found_in_a_command():
    for command in (
        "mpirun -np 2 python -m pydtnn.train",
        "srun python -m pydtnn train",
        "mpirun /env/bin/pydtnn-train",
        "pydtnn train",
    ):
        words = command.split()
        assert find_options([*words, "--lr", "1"]) == len(words)


@each(
    ("status", "signals", "began", "complete", "expected"),
    [
        (0, [], True, True, False),
        (74, [], True, True, False),
        (1, [], False, False, False),  # options are refused
        (1, [], True, True, True),
        (9, [], False, False, True),
        (75, [], False, False, True),
        (0, [], False, False, True),  # as with Open MPI, if all ranks were killed
        (0, [], True, False, True),
        (143, [], True, False, False),  # what a signal has ended has not failed
        (9, [signal.SIGTERM], True, False, False),
        (9, [signal.SIGUSR1], True, False, True),
    ],
)
def test_failures_are_told_from_refused_options(status, signals, began, complete, expected):
    assert failed(ProgramEnd(status, signals), began=began, complete=complete) is expected


@each(
    ("arguments", "message"),
    [
        (["mpirun"], "expected -- before the command to run"),
        (["--restarts", "x", "--", "pydtnn-train"], "expected a number of restarts from 0"),
        (["--", "python", "mine.py"], "expected a command that runs pydtnn.train"),
        (["--", "pydtnn-train", "--epoks", "3"], "did you mean '--epochs'"),
        (["--", "pydtnn-train", "--resume", "nowhere"], "nowhere does not exist"),
        (["--", "pydtnn-train", "--load", "a", "--evaluate-only"], "nothing to continue"),
        (["--", "no-such-program", "-m", "pydtnn.train"], "no-such-program cannot be started"),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, message, inside, capsys):
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("pydtnn.")
    assert told.count("\n") == 1
    assert message in told
    assert not [*inside.glob("runs/*")]


def test_refused_options_are_not_tried_again_and_leave_no_folder(inside):
    command = script(inside, COUNTED + 'print("train: no", file=sys.stderr)\nsys.exit(1)')
    assert Launch([*command, "--epochs=3"], 3).run() == 1
    assert attempts(inside) == ["--epochs=3 --output-dir runs/resnet44-synthetic-1"]
    assert not (inside / "runs").exists()


CHECKPOINT = """
folder = pathlib.Path("runs/resnet44-synthetic-1")
(folder / f"checkpoint-{len(done) + 1:08}").mkdir()
about = '{"configuration": {"model": "resnet44"}, "ended": "now"}'
(folder / "run.json").write_text(about)
"""


def test_a_run_that_makes_progress_is_continued_in_its_folder(inside, capfd):
    command = script(inside, COUNTED + CHECKPOINT + "sys.exit(9 if len(done) < 3 else 0)")
    assert Launch([*command, "--epochs=3", "--trace=t"], 3).run() == 0
    assert attempts(inside) == [
        "--epochs=3 --trace=t --output-dir runs/resnet44-synthetic-1",
        *(
            f"--resume runs/resnet44-synthetic-1 --epochs 3 --trace t-restart{number}"
            for number in (1, 2, 3)
        ),
    ]
    assert capfd.readouterr().err.splitlines() == [
        f"pydtnn.launch: restart {n} of 3: the run has ended (status 9); continuing from "
        f"runs/resnet44-synthetic-1/checkpoint-{n:08}"
        for n in (1, 2, 3)
    ]


def test_restarts_are_limited(inside, capfd):
    command = script(inside, COUNTED + "sys.exit(7)")
    assert Launch(command, 10).run() == 7
    assert len(attempts(inside)) == 3
    last = capfd.readouterr().err.splitlines()[-1]
    assert "given up: 2 restarts in a row have written no checkpoint" in last
    (inside / "attempts").unlink()
    assert Launch(script(inside, COUNTED + CHECKPOINT + "sys.exit(7)"), 1).run() == 7
    assert len(attempts(inside)) == 2


def test_a_requeued_job_continues_in_the_folder_of_the_job(inside, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    command = script(
        inside, COUNTED + CHECKPOINT.replace("resnet44-synthetic-1", "job-4711") + "sys.exit(0)"
    )
    (inside / "runs/job-4711").mkdir(parents=True)
    assert Launch(command, 3).run() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert Launch(command, 3).run() == 0
    assert attempts(inside) == ["--output-dir runs/job-4711", "--resume runs/job-4711"]


def test_a_signal_is_passed_on_also_after_a_stop_and_its_status_returned(inside):
    command = script(
        inside,
        "import signal\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(143))\n"
        'pathlib.Path("ready").touch()\ntime.sleep(600)',
    )
    line = [sys.executable, "-m", "pydtnn.launch", "--", *command]
    with subprocess.Popen(line, cwd=inside) as process:
        wait_for((inside / "ready").exists)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.8)  # longer than it waits for a signal at a time
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(300) == 143


@pytest.mark.long
@mpi
def test_a_killed_rank_costs_one_restart_and_no_byte(tmp_path):
    options, victim = [*TINY, *EXACT, "--epochs=12", "--output-dir=run", "--quiet"], 1
    (whole := tmp_path / "whole").mkdir()
    done = run(4, [*TRAIN, *options], directory=whole)
    assert done.returncode == 0, done
    command = [str(mpiexec()), "-n", "3", *script(tmp_path, HELD), *options]
    with subprocess.Popen(
        [sys.executable, "-m", "pydtnn", "launch", "--restarts=5", "--", *command],
        cwd=tmp_path,
        env={**MPICH, **os.environ},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        wait_for(lambda: len(find_checkpoints(tmp_path / "run")) > 0)
        os.kill(ranks_of(processes_in(tmp_path))[victim], signal.SIGKILL)
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(300) == 0, told
    (line,) = [line for line in told.splitlines() if line.startswith("pydtnn.launch: ")]
    assert f"rank {victim}: terminated unexpectedly" in told
    assert "restart 1 of 5: the run has ended (status " in line
    assert "continuing from run/checkpoint-" in line
    ours, theirs = (one / "net.pydtnn" / "weights.safetensors" for one in (tmp_path, whole))
    assert ours.read_bytes() == theirs.read_bytes()
