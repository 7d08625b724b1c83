"""`--parallel` and `--plan`: from their text to runs on a mesh, which others continue."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli import run as runs
from pydtnn.cli.build import create_job
from pydtnn.cli.config import read_axes
from pydtnn.cli.parallel import create_mesh
from pydtnn.cli.parser import parse
from pydtnn.cli.run_directory import EarlierRun, start_values
from pydtnn.comm import Communicator, run_threads
from pydtnn.train import execute, main
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


TEXT = ["--dataset=text:length=16", "--steps-per-epoch=3", "--global-batch-size=8", "--epochs=1"]
IMAGES = ["--dataset=synthetic:samples=48,test_samples=8", "--global-batch-size=16", "--epochs=1"]
GPT = "gpt_nano:depth=2,heads=4,width=16"
DEEP = "gpt_nano:depth=8,heads=2,width=8,tied=false"
VIT = "from models.vit import vit\ndef small(*given): return vit(16, 2, 4, *given)\n"


def weights_on(processes: int, mpiexec: Any, folder: Path, options: list[str]) -> bytes:
    """Train on so many processes; return the file of the weights."""
    file = folder / "w.safetensors"
    arguments = [*TRAIN, *options, f"--output-dir={folder}", f"--save={file}"]
    done = mpiexec(processes, arguments)
    assert done.returncode == 0, done.stderr
    assert f"processes {processes} with up to {4 // processes} ranks" in " ".join(
        done.stdout.split()
    )
    return file.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options", "mesh"),
    [
        (GPT, TEXT, "tensor=4:exact=true"),
        (GPT, TEXT, "context=4:exact=true"),
        (GPT, [*TEXT, "--scheme=sharded", "--clip-norm=1"], "data=2,tensor=2:exact=true"),
        (f"moe_{GPT}", TEXT, "expert=4:exact=true"),
        ("FILE:small", IMAGES, "tensor=4:exact=true"),
        ("resnet8", IMAGES, "spatial=4:exact=true"),
        ("resnet8", IMAGES, "filter=4:exact=true"),
        ("resnet8", [*IMAGES, "--sync-batch-norm"], "data=2,channel=2:exact=true"),
        (DEEP, TEXT, "pipeline=4:exact=true,micro_batches=8,schedule=dualpipe"),
    ],
)
def test_a_network_that_is_cut_has_the_same_bytes_on_any_number_of_processes(
    model, options, mesh, tmp_path, mpiexec
):
    text, file = tmp_path / "text.txt", tmp_path / "vit.py"
    text.write_text("to be or not to be, that is the question. " * 40)
    file.write_text(VIT)
    options = [f"--model={model.replace('FILE', str(file))}", f"--parallel={mesh}", *options]
    if "gpt" in model:
        options.append(f"--data-dir={text}")
    found = {}
    for processes, threads in ((1, 1), (4, 1), *[(2, 2)] * (model == GPT)):
        folder = tmp_path / f"{processes}-{threads}"
        folder.mkdir()
        own = [*options, f"--threads={threads}"]
        found[processes, threads] = weights_on(processes, mpiexec, folder, own)
    assert len({*found.values()}) == 1, sorted(found)


@pytest.mark.long
def test_shards_of_exact_training_have_the_same_bytes_on_any_mesh_and_processes(tmp_path, mpiexec):
    options = ["--model=cnn", "--exact=shards=4", *IMAGES]
    found = []
    for mesh, processes in (("filter=4", 2), ("data=2,filter=2", 4), ("data=2,filter=2", 1)):
        folder = tmp_path / f"{mesh}-{processes}"
        folder.mkdir()
        given = [*options, f"--parallel={mesh}:exact=true"]
        found.append(weights_on(processes, mpiexec, folder, given))
    assert found[1] == found[2] != found[0]


def test_processes_that_share_ranks_train_as_one_that_has_all(tmp_path):
    """Processes are threads here."""
    found = []
    for processes in (1, 2, 4):
        file = tmp_path / f"{processes}.safetensors"
        own = [
            f"--save={file}",
            "--steps-per-epoch=2",
            "--quiet",
            f"--output-dir={tmp_path / str(processes)}",
        ]
        config = parse([*TINY, "--parallel=filter=4:exact=true", *own])
        run_threads(
            processes, lambda comm, config=config: execute(config, comm, partial(runs.run, config))
        )
        found.append(file.read_bytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.long
def test_a_run_continues_on_another_number_of_processes_with_the_same_bytes(
    tmp_path, capsys, mpiexec
):
    options = [*TINY, "--parallel=filter=4:exact=true"]
    whole, run = tmp_path / "whole.safetensors", tmp_path / "run"
    assert main([*options, f"--output-dir={tmp_path / 'serial'}", f"--save={whole}"]) == 0
    done = mpiexec(2, [*TRAIN, *options, f"--output-dir={run}", "--stop-at=0"])
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "history.json").read_text())
    saved = tmp_path / "w.safetensors"
    assert main([f"--resume={run}", f"--save={saved}", "--stop-at=2"]) == 0
    assert saved.read_bytes() == whole.read_bytes()
    assert "continuing from" in (out := capsys.readouterr().out)
    assert "mesh        data 1 x filter 4" in out


@each(
    ("options", "problem"),
    [
        (["--parallel=filter=4:exact=true", "--survive"], "with --survive; omit one"),
        (["--parallel=filter=4:exact=true", "--tuning=measure"], "--tuning measure; use fixed"),
        (["--parallel=filter=4:exact=true", "--allreduce=ring"], "--allreduce ring; omit it"),
        (["--parallel=auto:exact=true"], "with --parallel auto; name the axes"),
    ],
)
def test_what_depends_on_processes_is_refused_where_they_share_ranks(options, problem):
    with pytest.raises(ValueError, match="train: --parallel exact cannot be combined") as raised:
        parse([*TINY, *options])
    assert problem in str(raised.value)
