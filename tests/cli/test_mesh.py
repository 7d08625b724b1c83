"""`--parallel` and `--plan`: from their text to runs on a mesh, which others continue."""

from __future__ import annotations

import json
import re

import pytest

from pydtnn.cli.build import create_job
from pydtnn.cli.config import read_axes
from pydtnn.cli.parallel import create_mesh
from pydtnn.cli.parser import parse
from pydtnn.cli.run_directory import EarlierRun, start_values
from pydtnn.comm import Communicator, run_threads
from pydtnn.train import main
from tests.each import each
from tests.small_run import TINY, TRAIN

CNN = [option for option in TINY if not option.startswith(("--model", "--global"))]
CNN += ["--model=cnn", "--batch-size=8", "--tuning=fixed"]
STAGES = ["--parallel=pipeline=2"]


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
def test_axes_that_cannot_be_are_refused(text, problem):
    with pytest.raises(ValueError, match="train: --parallel") as raised:
        parse([f"--parallel={text}"])
    assert problem in str(raised.value)


def test_axes_are_read_in_their_order():
    assert list(read_axes(" spatial=2, data=3,").items()) == [("spatial", 2), ("data", 3)]
    assert read_axes(None) == read_axes("") == {}


@pytest.mark.long  # tests/training/test_mesh.py continues on meshes, too
def test_a_run_continues_on_any_mesh(tmp_path, capsys, mpiexec):
    """On 4 ranks, and serially."""
    plan, folder, serial = (tmp_path / name for name in ("plan.yaml", "run", "serial"))
    plan.write_text("'*': {filter: model}\n")
    options = ["--parallel=data=2,model=2", f"--plan={plan}", "--ema=0.9"]
    done = mpiexec(4, [*TRAIN, *CNN, *options, "--epochs=1", f"--output-dir={folder}"])
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()
    assert "mesh        data 2 x model 2" in first
    assert "batch       8 per rank, 16 in total; 1 epoch of 8 steps" in first
    assert len([line for line in first if line.startswith("epoch 1/1")]) == 1
    content = json.loads((folder / "run.json").read_text())
    assert (content["ranks"], content["mesh"]) == (4, {"data": 2, "model": 2})
    other = [*CNN, "--ema=0.9", f"--output-dir={serial}", "--batch-size=16"]
    assert main([*other, "--epochs=1"]) == 0
    capsys.readouterr()
    histories = []
    for run in (folder, serial):
        assert main([f"--resume={run}", "--epochs=2"]) == 0
        histories.append(json.loads((run / "history.json").read_text()))
    assert "--parallel data=2,model=2 -> none" in capsys.readouterr().out.replace('"', "")
    for own, expected in zip(*histories, strict=True):
        assert own == pytest.approx(expected, rel=1e-3)  # float32


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--parallel=data=3"], "--parallel: axes must multiply to the number of ranks, 2, got "),
        (["--parallel=filtr=2"], "unknown strategy 'filtr'"),
        (["--parallel=filter=2", "--plan=absent.yaml"], "file absent.yaml does not exist"),
        (["--parallel=spatial=2", "--exact", "--global-batch-size=16"], "exact training requires"),
        ([*STAGES, "--pipeline-schedule=1f2b"], "unknown pipeline schedule '1f2b'"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(options, problem, tmp_path):
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
def test_a_run_keeps_its_mesh_on_as_many_ranks(given, ranks, kept):
    values = start_values(EarlierRun("runs/a", dict(MESH), 4, 32), given, ranks)
    assert values == {"resume": True, "output_dir": "runs/a"} | kept
