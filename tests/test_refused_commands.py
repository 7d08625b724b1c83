"""A command that is refused changes nothing: every file and folder is the same before and after."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydtnn.cli.parser import parse
from pydtnn.cli.run import run as run_training
from pydtnn.comm import Communicator
from pydtnn.train import main as train
from pydtnn.utils.errors import AgreedError
from tests.data.image_files import write_images
from tests.each import each
from tests.small_run import TINY

NEW = ["--output-dir=new/run"]
OTHER = "--dataset-options"
DATA = {"samples": 120, "test_samples": 40, "shape": "[12, 12, 1]", "classes": 4}


def data(**changed: object) -> str:
    """The option of `TINY` with other data."""
    values = ", ".join(f'"{name}": {value}' for name, value in {**DATA, **changed}.items())
    return f"--dataset-options={{{values}}}"


SPACE = "fixed: {{model: mlp, epochs: {epochs}}}\nspace: {{lr: [{lr}]}}\n{more}\n"

TRAINING = {
    "no epochs": [*TINY, *NEW, "--epochs=0"],
    "a folder with checkpoints": [*TINY, "--output-dir=runs/a", "--save=new/weights.safetensors"],
    "an unknown model": [*TINY, *NEW, "--model=nonsense"],
    "an unknown loss": [*TINY, *NEW, "--loss=nonsense"],
    "an unknown metric": [*TINY, *NEW, "--metrics=nonsense"],
    "an unknown value to monitor": [*TINY, *NEW, "--monitor=nonsense"],
    "an unknown optimizer": [*TINY, *NEW, "--optimizer=nonsense"],
    "an option of a schedule": [*TINY, *NEW, '--schedule-options={"rise": -1}'],
    "an unknown scheme": [*TINY, *NEW, "--scheme=nonsense"],
    "too many micro-batches": [
        *(*TINY, *NEW, "--accumulation=99", "--trace=new/trace", "--mlperf-log=new/log"),
        *("--save=other/new.pydtnn", "--tensorboard"),
    ],
    "a model that cannot be replaced": [*TINY, *NEW, "--save=pictures"],
    "a folder for weights": [*TINY, *NEW, "--save=weights.safetensors/new/w.safetensors"],
    "weights of another network": [*TINY, *NEW, "--model=cnn", "--load=weights.safetensors"],
    "missing weights": [*TINY, *NEW, "--load=none.safetensors", "--trace=new/trace"],
    "a folder with a trace": [*TINY, *NEW, "--trace=trace"],
    "an unknown layer": [*TINY, *NEW, "--freeze=nonsense"],
    "a missing folder of images": [*NEW, "--model=mlp", "--dataset=folder", "--data-dir=none"],
    "a folder without shards": [*NEW, "--model=mlp", "--dataset=shards", "--data-dir=pictures"],
    "local checkpoints of another run": [*TINY, *NEW, "--checkpoint-local=local"],
    "virtual ranks without a platform": [*TINY, *NEW, "--virtual-ranks=2"],
    "an unknown platform": [*TINY, *NEW, "--virtual-ranks=2", "--platform=nonsense"],
    "an unknown mesh": [*TINY, *NEW, "--parallel=filter=2"],
    "a missing configuration": [*TINY, *NEW, "--config=none.yaml"],
    "exact training without a batch": [*NEW, "--model=mlp", "--exact"],
}
"""Trainings that do not begin."""

RESUMING = {
    "another batch": ["--resume=runs/a", "--epochs=3", "--batch-size=8"],
    "another batch, with a trace": [
        *("--resume=runs/a", "--epochs=3", "--global-batch-size=8", "--trace=new/trace"),
        *("--save=new/model.pydtnn", "--mlperf-log=new/log", "--tensorboard"),
    ],
    "another seed": ["--resume=runs/a", "--epochs=3", "--seed=1"],
    "another network": ["--resume=runs/a", "--epochs=3", "--model=cnn"],
    "another optimizer": ["--resume=runs/a", "--epochs=3", "--optimizer=adam"],
    "other metrics": ["--resume=runs/a", "--epochs=3", "--metrics=top2_accuracy"],
    "fewer samples": ["--resume=runs/a", "--epochs=3", data(samples=100)],
    "other classes": ["--resume=runs/a", "--epochs=3", data(classes=3)],
    "another shape": ["--resume=runs/a", "--epochs=3", data(shape="[10, 10, 1]")],
    "no weights of the best epoch": ["--resume=runs/a", "--epochs=3", "--restore-best"],
    "too many micro-batches": ["--resume=runs/a", "--epochs=3", "--accumulation=99"],
    "a folder without a run": ["--resume=runs/none"],
    "a checkpoint": ["--resume=runs/a/checkpoint-00000016"],
    "another folder": ["--resume=runs/a", "--output-dir=b"],
    "a damaged checkpoint": ["--resume=runs/damaged", "--epochs=3"],
    "an interrupted run with another batch": ["--resume=runs/b", "--epochs=3", "--batch-size=8"],
    "a model that cannot be replaced": ["--resume=runs/a", "--epochs=3", "--save=pictures"],
    "a folder with a trace": ["--resume=runs/a", "--epochs=3", "--trace=trace"],
}
"""Runs that are not continued."""

EVALUATING = {
    "a folder without a run": ["--evaluate-only", "--resume=runs/none"],
    "a folder without checkpoints": [*TINY, "--evaluate-only", "--resume", "--output-dir=pictures"],
    "another network": [
        *("--evaluate-only", "--resume=runs/a", "--model=cnn", "--save=new/model.pydtnn"),
        "--trace=new/trace",
    ],
    "missing weights": [*TINY, "--evaluate-only", "--load=none.safetensors"],
    "weights of another network": [
        *(*TINY, "--evaluate-only", "--model=cnn", "--load=weights.safetensors"),
        *("--trace=new/trace", "--save=new/model.pydtnn"),
    ],
}
"""Evaluations that do not begin."""

OTHERS = {
    "launch": {
        "no command": ["python"],
        "a command without training": ["--", "echo", "pydtnn.train"],
        "an evaluation": ["--", "python", "-m", "pydtnn.train", "--evaluate-only"],
        "a run that does not exist": ["--", "python", "-m", "pydtnn.train", "--resume=runs/none"],
        "an unknown option": ["--", "python", "-m", "pydtnn.train", "--nonsense=3"],
        "more ranks for a complete run": ["--join", "runs/a"],
        "more ranks for no run": ["--join", "pictures"],
    },
    "predict": {
        "a missing model": ["none.pydtnn", "pictures/train/ant/0.png"],
        "a missing image": ["model.pydtnn", "none.png"],
        "a file that is no image": ["model.pydtnn", "weights.safetensors", "--csv=new/p.csv"],
        "a run without best weights": ["runs/e", "pictures/train/ant/0.png"],
        "a folder without a model": ["pictures", "pictures/train/ant/0.png"],
    },
    "checkpoint": {
        "a folder without checkpoints": ["list", "pictures"],
        "a damaged checkpoint": ["verify", "runs/damaged"],
        "a folder that does not exist": ["repair", "none"],
        "damaged beside good": ["diff", "runs/damaged", "runs/a"],
    },
    "trace": {
        "a folder without a trace": ["summary", "runs/a"],
        "an export of nothing": ["export", "runs/a", "--to=csv", "--output=new/x.csv"],
        "an unknown format": ["export", "trace", "--to=nonsense", "--output=new"],
        "a folder that exists": ["export", "trace", "--to=kineto", "--output=pictures"],
        "a missing trace": ["compare", "trace", "none"],
        "an unknown platform": ["replay", "trace", "--platform=nonsense"],
        "files that are no trace": [
            "import",
            "run.yaml",
            "--format=chakra",
            "--platform=cpu-1gbit",
        ],
    },
    "report": {
        "a missing run": ["none", "--output=new/page.html"],
        "an invalid step": ["runs/a", "--step=first", "--output=new/page.html"],
        "a missing trace": ["runs/a", "--trace=none", "--output=new/page.html"],
        "figures of a missing run": ["none", "--figures=svg", "--output=new"],
    },
    "runs": {
        "an unknown column": ["runs", "--sort=nonsense"],
        "a missing run": ["runs", "--diff", "a", "none"],
    },
    "oracle": {
        "an unknown model": ["--model=nonsense", "--platform=cpu-1gbit", "--csv=new/x.csv"],
        "an unknown platform": ["--model=mlp", "--platform=nonsense", "--json=new/x.json"],
        "no ranks": ["--model=mlp", "--platform=cpu-1gbit", "--ranks=0", "--csv=new/x.csv"],
    },
    "search": {
        "a missing space": ["none.yaml"],
        "an unknown sampler": ["sampler.yaml"],
        "an unknown option": ["option.yaml"],
        "an invalid value": ["value.yaml"],
        "an unknown objective": ["objective.yaml"],
        "another space": ["other.yaml", "--study=study"],
        "more ranks than there are": ["space.yaml", "--ranks-per-trial=2"],
    },
    "data": {
        "a missing folder": ["pack", "none", "--output=new"],
        "an invalid part": ["pack", "pictures/train", "--output=new", "--test-fraction=2"],
        "an invalid size": ["pack", "pictures", "--output=shards", "--shard-size=much"],
        "a damaged image over good shards": ["pack", "broken", "--output=shards"],
        "a folder without shards": ["verify", "pictures"],
        "a missing text": ["tokenizer", "none.txt", "--output=new/tokenizer.json"],
        "too few tokens": ["tokenizer", "run.yaml", "--vocabulary=3", "--output=new/t.json"],
    },
    "interchange": {
        "a missing file": ["import", "none.onnx", "new.pydtnn"],
        "weights without a network": ["import", "weights.safetensors", "new.pydtnn"],
        "a folder that is no model": ["import", "weights.safetensors", "pictures"],
        "weights of another network": [
            *("import", "weights.safetensors", "model.pydtnn", "--model=cnn", "--shape=12,12,1"),
            "--classes=4",
        ],
        "a missing model": ["export", "none.pydtnn", "new.onnx"],
        "names in a graph": ["export", "model.pydtnn", "new/x.onnx", "--names=hugging_face"],
        "names of another network": ["export", "model.pydtnn", "new.pt", "--like=none.pth"],
        "an unknown suffix": ["export", "model.pydtnn", "new/model.nonsense"],
    },
    "calibrate": {
        "unknown instructions": ["--output=new/p.yaml", "--isa=nonsense"],
        "no threads": ["--output=new/p.yaml", "--threads=0"],
    },
    "comm": {
        "an unknown algorithm": ["check", "nonsense", "-np", "2"],
        "a drawing of nothing": ["draw", "nonsense", "-np", "2", "--output=new.svg"],
    },
    "testing": {"a missing file": ["none.py:Scheme"]},
}
"""Arguments of other commands."""

CASES = {
    **{f"training, {name}": ("train", given) for name, given in TRAINING.items()},
    **{f"resuming, {name}": ("train", given) for name, given in RESUMING.items()},
    **{f"evaluating, {name}": ("train", given) for name, given in EVALUATING.items()},
    **{
        f"{command}, {name}": (command, given)
        for command, kinds in OTHERS.items()
        for name, given in kinds.items()
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with runs, models, traces, images, shards and a study, where commands run."""
    before, root = Path.cwd(), tmp_path_factory.mktemp("place")
    os.chdir(root)
    try:
        write_images(root / "pictures")
        shutil.copytree("pictures", "broken")
        (root / "broken" / "train" / "cat" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
        options = [*TINY, "--quiet", "--checkpoint-local=local"]
        assert train([*options, "--output-dir=runs/a", "--save=model.pydtnn"]) == 0
        options = [*TINY, "--quiet", "--trace=trace"]
        assert train([*options, "--output-dir=runs/c", "--save=weights.safetensors"]) == 0
        for name, copied in ("b", "a"), ("damaged", "c"):
            shutil.copytree(f"runs/{copied}", f"runs/{name}")
        for path in (root / "runs" / "damaged").glob("checkpoint-*/arrays*"):
            path.write_bytes(path.read_bytes()[:-1])
        shutil.copytree("runs/a", "runs/e", ignore=shutil.ignore_patterns("best*"))
        (root / "runs" / "b" / ".checkpoint-00000099.partial").mkdir()
        (root / "runs" / "b" / ".checkpoint-00000099.partial" / "state.json").touch()
        (root / "runs" / "b" / f".run.json.{'0f' * 16}").touch()
        assert [*(root / "local" / platform.node()).glob("checkpoint-*")]
        for name, text in {
            "run": "model: mlp\n",
            "space": SPACE.format(epochs=1, lr="0.1", more="trials: 1"),
            "other": SPACE.format(epochs=1, lr="0.1, 0.2", more="trials: 1"),
            "sampler": SPACE.format(epochs=1, lr="0.1", more="sampler: nonsense"),
            "option": SPACE.format(epochs="1, nonsense: 3", lr="0.1", more=""),
            "value": SPACE.format(epochs=1, lr="0.1, -1", more=""),
            "objective": SPACE.format(epochs=1, lr="0.1", more="objective: {maximize: nonsense}"),
        }.items():
            (root / f"{name}.yaml").write_text(text)
        assert run("data", ["pack", "pictures", "--output=shards"]) == 0
        if importlib.util.find_spec("optuna"):
            from pydtnn.search.space import read_space
            from pydtnn.search.study import SharedStudy

            SharedStudy(root / "study", read_space("space.yaml")).close()
        yield root
    finally:
        os.chdir(before)


def run(command: str, arguments: list[str]) -> int:
    """Call the main function of a command; return its exit status."""
    module = importlib.import_module(
        {
            "oracle": "pydtnn.perfmodel.oracle.command",
            "calibrate": "pydtnn.perfmodel.calibration.command",
        }.get(command, f"pydtnn.{command}")
    )
    if not hasattr(module, "main"):
        module = importlib.import_module(f"pydtnn.{command}.__main__")
    try:
        return int(module.main(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def content(root: Path) -> dict[str, bytes | None]:
    """Every folder and the bytes of every file."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@each("case", CASES)
def test_a_refused_command_changes_no_byte_of_any_folder(
    case: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    command, arguments = CASES[case]
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = content(place)
    status = run(command, arguments)
    told = capfd.readouterr()
    after = content(place)
    changed = [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]
    assert (status != 0, changed) == (True, []), told.out + told.err
    assert told.err
    assert not (tmp_path / "pydtnn").exists()


@pytest.mark.threads(2)
def test_what_two_ranks_refuse_changes_no_byte_either(comm: Communicator, place: Path) -> None:
    options = [*TINY, "--quiet", "--resume", "--output-dir=runs/a", "--trace=new/trace"]
    config = parse([*options, "--epochs=3", "--global-batch-size=8"])
    before = comm.gather_object(content(place))[0]
    with pytest.raises(AgreedError, match="global batch size must be 16"):
        run_training(config, comm)
    assert comm.gather_object(content(place)) == [before, before]
