"""`--parallel` and `--plan`: from their text to runs on a mesh, which others continue."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.build import create_job
from pydtnn.cli.config import read_axes
from pydtnn.cli.parallel import create_mesh
from pydtnn.cli.parser import parse
from pydtnn.cli.run_directory import Run, start_values
from pydtnn.comm import Communicator, run_threads
from pydtnn.train import main
from tests.each import each
from tests.launch import Finished
from tests.small_run import TINY, TRAIN, only_line

CNN = [option for option in TINY if not option.startswith(("--model", "--global"))]
CNN += ["--model=cnn", "--batch-size=8", "--tuning=fixed"]


@each(
    ("text", "problem"),
    [
        ("data=2,filter", "got 'filter'"),
        ("data=0", "at least 1, such as data=2,filter=4, got 'data=0'"),
        ("data=two", "got 'data=two'"),
        ("Data=2", "got 'Data=2'"),
        ("2", "got '2'"),
        ("data=2,data=2", "the axis data occurs twice"),
        ("batch=2", "the axis batch is not possible"),
    ],
)
def test_axes_that_cannot_be_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="train: --parallel") as raised:
        parse([f"--parallel={text}"])
    assert problem in str(raised.value)


def test_axes_are_read_in_their_order() -> None:
    assert list(read_axes(" spatial=2, data=3,").items()) == [("spatial", 2), ("data", 3)]
    assert read_axes(None) == read_axes("") == {}


def test_a_plan_requires_a_mesh() -> None:
    with pytest.raises(ValueError, match="--plan requires --parallel"):
        parse(["--plan=filter"])


@pytest.mark.long  # tests/training/test_mesh.py continues on meshes, too
def test_a_run_continues_on_any_mesh(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mpiexec: Callable[..., Finished],
) -> None:
    """On 4 ranks, on 3 with another mesh, and serially."""
    plan, folder, whole = (tmp_path / name for name in ("plan.yaml", "run", "whole.safetensors"))
    plan.write_text("'*': {filter: model}\n")
    options = ["--parallel=data=2,model=2", f"--plan={plan}", "--ema=0.9", f"--save={whole}"]
    done = mpiexec(4, [*TRAIN, *CNN, *options, "--epochs=1", f"--output-dir={folder}"])
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()
    assert "mesh        data 2 x model 2" in first
    assert "batch       8 per rank, 16 in total; 1 epoch of 8 steps" in first
    assert len([line for line in first if line.startswith("epoch 1/1")]) == 1
    content = json.loads((folder / "run.json").read_text())
    assert (content["ranks"], content["mesh"]) == (4, {"data": 2, "model": 2})

    resume = f"--resume={folder}"
    done = mpiexec(3, [*TRAIN, resume, "--epochs=2", "--parallel=spatial=3"])
    assert "--parallel data=2,model=2 -> spatial=3" in done.stdout.replace('"', "")
    assert main([resume, "--epochs=3"]) == 0
    assert "--parallel spatial=3 -> none" in capsys.readouterr().out.replace('"', "")
    history = json.loads((folder / "history.json").read_text())

    other = [*CNN, "--ema=0.9", f"--output-dir={tmp_path / 'serial'}", "--batch-size=16"]
    assert main([*other, "--epochs=1"]) == 0
    assert main([f"--resume={tmp_path / 'serial'}", "--epochs=2"]) == 0
    assert main([f"--resume={tmp_path / 'serial'}", "--epochs=3"]) == 0
    serial = json.loads((tmp_path / "serial" / "history.json").read_text())
    for own, expected in zip(history, serial, strict=True):
        assert own == pytest.approx(expected, rel=1e-3)  # float32
    capsys.readouterr()
    assert main([*CNN, f"--load={whole}", "--evaluate-only"]) == 0
    assert f"loss {history[-1]['val_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--parallel=data=3"], "--parallel: axes must multiply to the number of ranks, 2, got "),
        (["--parallel=filtr=2"], "unknown strategy 'filtr'"),
        (["--parallel=filter=2", "--plan=absent.yaml"], "file absent.yaml does not exist"),
        (["--parallel=spatial=2", "--exact", "--global-batch-size=16"], "exact training requires"),
        (["--parallel=filter=2", "--optimizer=lars"], "LARS requires whole parameters"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    options: list[str], problem: str, tmp_path: Path
) -> None:
    config = parse([*CNN, *options])

    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=re.escape(problem)):
            create_job(config, comm, 1, tmp_path, create_mesh(config.parallel, comm))

    run_threads(2, rank)


MESH = {"parallel": "data=2,filter=2", "plan": "filter"}


@each(
    ("given", "ranks", "kept"),
    [
        (set(), 4, MESH),
        (set(), 2, {"global_batch_size": 32}),
        ({"parallel"}, 4, {"global_batch_size": 32}),
        ({"parallel", "batch_size"}, 4, {}),
    ],
)
def test_a_run_keeps_its_mesh_on_as_many_ranks(
    given: set[str], ranks: int, kept: dict[str, Any]
) -> None:
    values = start_values(Run("runs/a", dict(MESH), 4, 32), given, ranks)
    assert values == {"resume": True, "output_dir": "runs/a"} | kept


def test_another_number_of_ranks_is_one_sentence(
    tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    done = mpiexec(2, [*TRAIN, *CNN, "--parallel=data=3", f"--output-dir={tmp_path / 'run'}"])
    assert done.returncode != 0
    sentence = "train: --parallel: axes must multiply to the number of ranks, 2, got data=3, which"
    assert only_line(done.stderr).startswith(sentence)
    assert not (tmp_path / "run").exists()
