"""`--parallel` and `--plan`: from their text to runs on a mesh, which others continue."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.continuing import Run, start_values
from pydtnn.cli.mesh import read_axes
from pydtnn.cli.parser import parse
from pydtnn.comm import Communicator, run_threads
from pydtnn.train import main
from pydtnn.utils.errors import AgreedError
from tests.launch import Finished
from tests.small_run import TINY, TRAIN, only_line

CNN = [option for option in TINY if not option.startswith(("--model", "--global"))]
CNN += ["--model=cnn", "--batch-size=8", "--tuning=fixed"]


def run(ranks: int, *options: str) -> None:
    """Run the command on threads."""

    def rank(comm: Communicator) -> None:
        assert main(options) == 0

    run_threads(ranks, rank)


@pytest.mark.parametrize(
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


def test_a_run_continues_on_any_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("'*': {filter: model}\n")
    options = ["--parallel=data=2,model=2", "--plan=plan.yaml", "--ema=0.9"]
    run(4, *CNN, *options, "--epochs=1", "--output-dir=run", "--save=whole.safetensors")
    first = capsys.readouterr().out
    assert first.count("\nmesh") == 1
    assert "data 2 x model 2" in first
    assert "batch       8 per rank, 16 in total" in first
    assert len([line for line in first.splitlines() if line.startswith("epoch 1/1")]) == 1
    content = json.loads(Path("run/run.json").read_text())
    assert (content["ranks"], content["mesh"]) == (4, {"data": 2, "model": 2})
    run(2, "--resume=run", "--epochs=2")  # without the mesh
    assert "--parallel data=2,model=2 -> none" in capsys.readouterr().out.replace('"', "")
    run(3, "--resume=run", "--epochs=3", "--parallel=spatial=3")
    assert main(["--resume=run", "--epochs=4"]) == 0
    history = json.loads(Path("run/history.json").read_text())

    run(1, *CNN, "--ema=0.9", "--output-dir=serial", "--global-batch-size=16", "--epochs=1")
    run(1, "--resume=serial", "--epochs=2")
    run(1, "--resume=serial", "--epochs=3")
    run(1, "--resume=serial", "--epochs=4")
    for own, other in zip(
        history, json.loads(Path("serial/history.json").read_text()), strict=True
    ):
        assert own == pytest.approx(other, rel=1e-3)  # float32
    capsys.readouterr()
    assert main([*CNN, "--load=whole.safetensors", "--evaluate-only"]) == 0
    assert f"loss {history[-1]['val_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--parallel=data=3"], "--parallel: axes must multiply to the number of ranks, 2, got "),
        (["--parallel=filtr=2"], "unknown strategy 'filtr'"),
        (["--parallel=filter=2", "--plan=absent.yaml"], "absent.yaml cannot be read"),
        (["--parallel=spatial=2", "--exact", "--global-batch-size=16"], "exact training requires"),
        (["--parallel=filter=2", "--optimizer=lars"], "LARS requires whole parameters"),
    ],
)
def test_what_cannot_be_is_one_sentence_on_all_ranks(
    options: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def rank(comm: Communicator) -> str:
        with pytest.raises(AgreedError) as raised:
            main([*CNN, *options])
        return str(raised.value)

    sentences = run_threads(2, rank)
    assert sentences == [sentences[0]] * 2
    assert problem in sentences[0]
    assert not Path("runs").exists()


MESH = {"parallel": "data=2,filter=2", "plan": "filter"}


@pytest.mark.parametrize(
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


def test_processes_train_on_a_mesh_and_refuse_another_number(
    tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    options = [*TRAIN, *CNN, "--epochs=1", f"--output-dir={tmp_path}"]
    done = mpiexec(4, [*options, "--parallel=data=2,filter=2", "--quiet"])
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    done = mpiexec(2, [*options, "--parallel=data=2,filter=2"])
    assert done.returncode != 0
    assert only_line(done.stderr).startswith(
        "--parallel: axes must multiply to the number of ranks"
    )
