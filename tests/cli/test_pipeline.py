"""Pipelines on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pydtnn.cli.parser import parse
from pydtnn.comm import Communicator, run_threads
from pydtnn.tools.perfmodel.predicted import choose_parallel
from pydtnn.train import main
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY, TRAIN

OPTIONS = [*TINY, "--batch-size=16", "--tuning=fixed", "--epochs=1", "--quiet"]
PIPELINE = ["--parallel=pipeline=2", "--micro-batches=4"]
RUNS = ("run", "serial")


@each("option", ["micro_batches=2", "schedule=gpipe"])
def test_options_of_a_pipeline_require_its_axis(option):
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=f"--parallel {name} requires --parallel pipeline=2"):
        parse([f"--parallel=data=2:{option}"])
    assert parse([f"--parallel=pipeline=2:{option}"])


def test_processes_train_in_stages_and_one_continues(tmp_path, mpiexec, monkeypatch):
    options = [*OPTIONS, "--model=cnn", "--global-batch-size=16", "--steps-per-epoch=3"]
    stages = [*PIPELINE, "--pipeline-schedule=zb_v"]
    done = mpiexec(2, [*TRAIN, *options, *stages, f"--output-dir={tmp_path}/run"])
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    assert main(["--resume=run", "--epochs=2", "--accumulation=4"]) == 0
    assert main([*options, "--accumulation=4", "--output-dir=serial"]) == 0
    assert main(["--resume=serial", "--epochs=2"]) == 0
    ours, serial = (json.loads(Path(f"{run}/history.json").read_text()) for run in RUNS)
    for own, other in zip(ours, serial, strict=True):
        assert own == pytest.approx(other, rel=1e-4)  # float32


def test_auto_chooses_the_fastest_schedule_that_fits_into_memory(tmp_path):
    options = [*TINY, *PIPELINE, "--model=resnet8", "--batch-size=16", "--platform=cpu-1gbit"]

    def chosen(limit: str) -> tuple[str, list[str]]:
        config = parse([*options, "--pipeline-schedule=auto", *([limit] if limit else [])])
        ((config, lines), other) = run_threads(2, lambda comm: choose_parallel(config, comm, 1))
        assert other[0] == config
        assert (config.parallel, config.micro_batches) == ("pipeline=2", 4)
        return config.pipeline_schedule, lines

    fastest, lines = chosen("")
    assert lines[0].startswith("pipeline schedule: pipeline 2, " + fastest)
    found = {" ".join(cells[2:-8]) or "1f1b": cells for cells in map(str.split, lines[2:])}
    times = {name: float(cells[-8]) for name, cells in found.items()}
    assert times[fastest] == min(times.values())
    assert {"zb_h1", "1f1b"} <= times.keys()
    sizes = {name: float(cells[-2]) for name, cells in found.items() if cells[-1] == "MiB"}
    assert sizes.keys() == times.keys()
    smaller, _ = chosen(f"--memory-limit={min(sizes.values()) + 0.05:.2f}MiB")
    assert sizes[smaller] == min(sizes.values()) < sizes[fastest]


@each(
    ("options", "problem"),
    [
        (["--exact"], "--parallel schedule=auto has no formula for --exact; name a schedule"),
        (["--parallel=pipeline=4"], "must multiply to the number of ranks, 2, got pipeline=4"),
        (["--memory-limit=1MB"], "search: expected a memory limit of at least"),
    ],
)
def test_auto_refuses_what_it_cannot_choose_for(options, problem):
    given = [*OPTIONS, PIPELINE[0], "--pipeline-schedule=auto", "--platform=cpu-1gbit"]
    config = parse([*given, *options])

    def rank(comm: Communicator) -> None:
        with pytest.raises((ValueError, AgreedError), match=re.escape(problem)):
            choose_parallel(config, comm, 1)

    run_threads(2, rank)
