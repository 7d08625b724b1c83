"""`--parallel auto`, and the prediction in the report of a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.predicted import Predicted, StepMemory, no_formula, rows
from pydtnn.perfmodel.platform import FOLDER, Platform
from pydtnn.perfmodel.projection import Projector
from pydtnn.train import main
from pydtnn.utils.machine import peak_memory
from tests.launch import Finished
from tests.small_run import TINY, TRAIN

PREDICTED = r"time per step +measured \S+ ms; predicted \S+ of measured, \S+ ms for this job"

HEADS = """
from pydtnn.layers import Conv2d, Flatten, Linear, Sequential
from pydtnn.models.auxiliary import Heads

def early(classes, input_shape):
    head = Sequential(Flatten(), Linear(classes), name="early")
    last = Sequential(Flatten(), Linear(classes), name="last")
    return Heads(Conv2d(4, 3, name="conv"), last, heads={"conv": head})
"""


def test_one_rank_is_predicted_beside_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--parallel=auto", f"--output-dir={tmp_path / 'run'}", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^parallel: serial: \S+ ms per step by the model; limited by ", out, re.M)
    assert re.search(PREDICTED, out)
    for part in ("in compute", "in communication", "waiting for data", "memory of a rank"):
        assert re.search(rf"  {part} +measured \S+", out)
    predicted = json.loads((tmp_path / "run" / "run.json").read_text())["predicted"]
    parts = [predicted[name] for name in ("compute", "update", "communication", "data")]
    assert predicted["seconds"] == pytest.approx(sum(parts))
    assert predicted["reason"] == ""


def test_a_run_with_auxiliary_outputs_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(HEADS)
    model = [f"--model={tmp_path / 'own.py'}:early", "--auxiliary-weights=0.3"]
    assert main([*TINY, *model, f"--output-dir={tmp_path / 'run'}", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(PREDICTED, out)


def test_a_run_that_cannot_be_predicted_says_why_and_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*TINY, "--verbose", "--scheme=local_sgd", f"--output-dir={tmp_path / 'run'}"]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "ms; not predicted: the model of a step has no formula for --scheme local_sgd" in out

    assert main([*TINY, "--tuning=direct", f"--output-dir={tmp_path / 'direct'}", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "not predicted: --tuning direct measures nothing; name a --platform" in out

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no bandwidth")

    monkeypatch.setattr(Projector, "project", broken)
    assert main([*TINY, f"--output-dir={tmp_path / 'other'}", "--verbose"]) == 0
    assert "not predicted: ZeroDivisionError: no bandwidth" in capsys.readouterr().out


def test_quiet_runs_measure_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "cache"))
    assert main([*TINY, "--quiet", f"--output-dir={tmp_path / 'run'}"]) == 0
    assert not [*(tmp_path / "cache").glob("platform-*")]


def slow_network(path: Path) -> Path:
    """Fast compute and a slow network, on which gradients of large layers take long."""
    text = (FOLDER / "cpu-1gbit.yaml").read_text()
    text = re.sub(r"bandwidth: 1 Gbit/s|bandwidth: 125 MB/s", "bandwidth: 10 MB/s", text)
    text = re.sub(r"ranks_per_host: \d+", "ranks_per_host: 1", text)
    path.write_text(text)
    assert Platform.load(path).messages.between.bandwidth == 1e7
    return path


def test_two_ranks_train_with_the_choice_of_rank_0_which_others_can_repeat(
    tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    """On a slow network the weights of a large linear layer are cut."""
    platform, folder = slow_network(tmp_path / "slow.yaml"), tmp_path / "run"
    options = ['--model-options={"hidden": [2048, 2048]}', f"--platform={platform}", "--verbose"]
    options = [*TINY, *options]
    run = mpiexec(2, [*TRAIN, *options, "--parallel=auto", f"--output-dir={folder}"])
    assert run.returncode == 0, run.stdout + run.stderr
    chosen = json.loads((folder / "run.json").read_text())["configuration"]
    assert chosen["parallel"] not in (None, "auto")
    assert f"{chosen['parallel'].partition('=')[0]} 2" in run.stdout
    assert "measured" in run.stdout
    again = [f"--parallel={chosen['parallel']}"]
    again += [f"--plan={chosen['plan']}"] if chosen["plan"] else []
    other = mpiexec(2, [*TRAIN, *options, *again, f"--output-dir={tmp_path / 'again'}"])
    assert other.returncode == 0, other.stderr
    one, two = (
        json.loads((path / "history.json").read_text())[-1]["val_loss"]
        for path in (folder, tmp_path / "again")
    )
    assert one == two


def test_auto_refuses_what_it_has_no_formula_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "--parallel=auto", "--scheme=gossip", f"--output-dir={tmp_path / 'run'}"]
    assert main(options) == 1
    error = capsys.readouterr().err
    assert "--parallel auto has no formula for --scheme gossip; name the axes" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ""),
        ({"scheme": "local_sgd"}, "--scheme local_sgd"),
        ({"exact": True, "global_batch_size": 8}, "--exact"),
        ({"accumulation": 2}, "--accumulation"),
        ({"overlap": False}, "--no-overlap"),
        ({"freeze": "stem"}, "--freeze"),
    ],
)
def test_options_without_a_formula_are_named(options: dict, found: str) -> None:
    assert no_formula(TrainConfig(**options)) == found


def test_a_limit_of_memory_is_that_of_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "--parallel=auto", "--quiet", "--memory-limit=1MB"]
    assert main([*options, f"--output-dir={tmp_path / 'small'}"]) == 1
    assert "search: expected a memory limit of at least" in capsys.readouterr().err
    options[-1] = "--memory-limit=1GB"
    assert main([*options, f"--output-dir={tmp_path / 'large'}"]) == 0


def test_lines_of_the_report_compare_each_part() -> None:
    predicted = Predicted("p", 0.010, 0.006, 0.001, 0.002, 0.001, 5e6)
    measured = {
        "seconds": 0.0125,
        "compute": 0.008,
        "communication": 0.003,
        "data": 0.0015,
        "memory": 6e6,
    }
    found = dict(rows(predicted, measured))
    assert found["time per step"] == "measured 12.5 ms; predicted 0.80 of measured, 10 ms for p"
    assert found["  in compute"].startswith("measured 8 ms, predicted 7 ms, 1 ms of it")
    assert found["  in communication"] == "measured 3 ms, predicted 2 ms"
    assert "measured 6 MB, predicted 5 MB" in found["  memory of a rank"]
    assert rows(predicted, {}) == []


def test_memory_is_that_of_the_steps_before_the_first_evaluation() -> None:
    def allocate(mebibytes: int) -> None:
        block = bytearray(mebibytes << 20)
        block[::4096] = bytes(len(block[::4096]))  # touch every page

    memory = StepMemory()
    allocate(300)  # tuning
    memory.on_step_end(None)  # type: ignore[arg-type]
    assert memory.grown > 290 << 20
    allocate(50)
    memory.on_step_end(None)  # type: ignore[arg-type]
    grown = memory.grown
    if sys.platform == "linux":
        assert 25 << 20 < grown < 100 << 20
        assert peak_memory() > 290 << 20
    memory.on_epoch_end(None)  # type: ignore[arg-type]
    allocate(200)
    memory.on_step_end(None)  # type: ignore[arg-type]
    assert memory.grown == grown
