"""Random training runs on random numbers of ranks, with a resume on others in the middle."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from tests import launch
from tests.fuzz.training_runs import Result, Run, Way, carry_out, different, result
from tests.small_training import Interrupted

LAUNCHED = 4
"""Runs that one launch of mpiexec carries out."""


def serial(run: Run) -> Result:
    """What one rank has after training without interruption."""
    trainer = run.trainer(Serial(), run.serially)
    run.fit(trainer, run.serially)
    return result(trainer)


def on_threads(run: Run, way: Way, folder: Path, at: int = 0) -> list[Result]:
    """Begin or continue a run; return what all ranks have at its end, nothing of one cut short."""

    def rank(comm: Communicator) -> Result:
        return carry_out(run, way, comm, folder, at)

    try:
        return run_threads(way.ranks, rank, hosts=way.hosts)
    except Interrupted:
        return []


def assert_same_bytes(ours: Result, expected: Result, *what: object) -> None:
    assert not different(ours, expected), " ".join(map(str, what))


@pytest.mark.fuzz("distributed")
def test_exact_runs_have_the_same_bytes_on_all_ranks_and_after_a_resume_on_others(cases, tmp_path):
    for case in cases:
        run = Run(int(case.rng.integers(1 << 31)))
        expected = serial(run)
        at = int(case.rng.integers(1, run.epochs * run.steps + 1))
        for cut in (at, 0):
            way = run.way()
            for ours in on_threads(run, way, tmp_path / "run", cut):
                case.compare(assert_same_bytes, ours, expected, run, way, "cut", at)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.mark.fuzz("distributed")
@pytest.mark.skipif(bool(launch.why_not()), reason=launch.why_not())
def test_exact_runs_have_the_same_bytes_over_mpi(cases, tmp_path):
    for case in cases:
        ranks = case.rng.choice([2, 3, 4], 2, replace=False).tolist()
        seeds = case.rng.integers(1 << 31, size=2 * LAUNCHED).tolist()
        drawn = [run for run in (Run(seed) for seed in seeds) if run.fits(max(ranks))]
        runs = drawn[:LAUNCHED]
        steps = case.rng.integers(1, [run.epochs * run.steps + 1 for run in runs]).tolist()
        cut = [f"{run.seed}:{at}" for run, at in zip(runs, steps, strict=True)]
        whole = [f"{run.seed}" for run in runs]
        for size, arguments in zip(ranks, (cut, whole), strict=True):
            command = ["-m", "tests.fuzz.mpi_runs", str(tmp_path), *arguments]
            finished = launch.run(size, command)
            assert finished.returncode == 0, (command, size, finished.stderr)
        for run in runs:
            ours, way = pickle.loads((tmp_path / f"{run.seed}.pickle").read_bytes())
            case.compare(assert_same_bytes, ours, serial(run), run, way, ranks, cut)
            shutil.rmtree(tmp_path / str(run.seed), ignore_errors=True)
