"""A signal ends training after a step, on all ranks, and a resumed run has the same bytes."""

from __future__ import annotations

import functools
import os
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from pydtnn.training.checkpoint import find_checkpoints
from tests.launch import Finished, Program, run, why_not
from tests.ranks import rank_processes, wait_for
from tests.small_run import HELD, TINY, TRAIN, only_line, processes_in

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

RANKS = 3
OPTIONS = [*TINY, "--epochs=12", "--output-dir=run", "--tuning=fixed", "--momentum=0.9"]
OPTIONS += ["--straggler-factor=0"]  # whatever else this machine does


@functools.cache
def reference(*options: str) -> dict[str, bytes]:
    """Return the files of the last checkpoint of a run that no signal ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finished = run(RANKS, [*TRAIN, *OPTIONS, *options], directory=folder)
        assert finished.returncode == 0, finished
        return files(folder / "run")


def files(directory: Path) -> dict[str, bytes]:
    """Return the files of the last checkpoint."""
    last = find_checkpoints(directory)[-1]
    return {"name": last.name.encode()} | {f.name: f.read_bytes() for f in last.iterdir()}


def interrupted(folder: Path, number: int, to: int | str, *options: str) -> Finished:
    """Signal a rank, "mpirun" or the whole "job" in training; return what it left."""
    with Program(RANKS, ["-c", HELD, *OPTIONS, *options], directory=folder) as program:
        wait_for(lambda: "epoch 1/" in program.finished().stdout)
        ranks, processes = rank_processes(program), program.descendants()
        if to in ("mpirun", "job"):
            program.signal(number)
        if to != "mpirun":
            for process in processes if to == "job" else [ranks[int(to)]]:
                os.kill(process, number)
        assert program.wait()
        wait_for(lambda: not processes_in(folder))
        return program.finished()


def check_end(finished: Finished, number: int, folder: Path) -> None:
    """Check status and message, and that there is a checkpoint of the last step."""
    assert finished.returncode == 128 + number, finished
    told = only_line(finished.stderr)
    name = signal.Signals(number).name
    found = re.fullmatch(
        rf"rank \d received {name}: training has ended after step (\d+) of epoch (\d+)", told
    )
    assert found, told
    step = int(found[1]) + 8 * (int(found[2]) - 1)
    assert find_checkpoints(folder / "run")[-1].name == f"checkpoint-{step:08}"


def check_resumed(folder: Path, *options: str) -> None:
    """Check that the resumed run has the same bytes as one that no signal has ended."""
    resumed = run(RANKS, [*TRAIN, "--resume", "run"], directory=folder)
    assert resumed.returncode == 0, resumed
    assert files(folder / "run") == reference(*options)


@pytest.mark.parametrize(
    ("number", "to", "options"),
    [
        (signal.SIGTERM, "job", ()),
        # It prints the table of ranks as usual, and then is as SIGTERM.
        (signal.SIGUSR1, 1, ("--grace=30",)),
        pytest.param(signal.SIGINT, "mpirun", (), marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_all_ranks_after_the_same_step(number, to, options, tmp_path):
    done = interrupted(tmp_path, number, to, *options)
    *table, line = done.stderr.splitlines()
    assert bool(table) == (number == signal.SIGUSR1)
    check_end(replace(done, stderr=f"{line}\n"), number, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [("--parallel=pipeline=3",), ("--exact", "--shards=3", "--checkpoint-steps=3", "--ema=0.9")],
    ids=" ".join,
)
def test_schemes_and_networks_that_are_cut_end_after_the_same_step(options, tmp_path):
    finished = interrupted(tmp_path, signal.SIGTERM, 1, *options)
    check_end(finished, signal.SIGTERM, tmp_path)
    check_resumed(tmp_path, *options)
