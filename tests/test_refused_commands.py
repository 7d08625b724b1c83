"""A command that is refused changes nothing: every file and folder is the same before and after."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydtnn.__main__ import module_of
from pydtnn.cli.parser import parse
from pydtnn.cli.run import run as run_training
from pydtnn.train import main as train
from pydtnn.utils.errors import AgreedError
from tests.data.image_files import write_images
from tests.each import each
from tests.small_run import TINY

pytestmark = pytest.mark.tools

NEW = ["--output-dir=new/run"]
AGAIN = ["--resume=runs/a", "--epochs=3"]

SPACE = "fixed: {{model: mlp, epochs: {epochs}}}\nspace: {{lr: [{lr}]}}\n{more}\n"

TRAINING = [
    [*TINY, "--output-dir=runs/a", "--save=new/weights.safetensors"],
    [*TINY, *NEW, "--schedule-options.rise=-1"],
    [*TINY, *NEW, "--accumulation=99", "--trace=new/trace"],
    [*TINY, *NEW, "--accumulation=99", "--save=other/new.pydtnn", "--tensorboard"],
    [*TINY, *NEW, "--save=pictures"],
    [*TINY, *NEW, "--save=weights.safetensors/new/w.safetensors"],
    [*TINY, *NEW, "--model=cnn", "--load=weights.safetensors"],
    [*TINY, *NEW, "--load=none.safetensors", "--trace=new/trace"],
    [*TINY, *NEW, "--trace=trace"],
    [*NEW, "--model=mlp", "--dataset=folder", "--data-dir=none"],
    [*NEW, "--model=mlp", "--dataset=shards", "--data-dir=pictures"],
    [*TINY, *NEW, "--virtual-ranks=2", "--platform=nonsense"],
    [*TINY, *NEW, "--parallel=filter=2"],
    # continuing
    [*AGAIN, "--batch-size=8", "--trace=new/trace"],
    [*AGAIN, "--global-batch-size=8", "--save=new/m.pydtnn"],
    [*AGAIN, "--model=cnn"],
    [*AGAIN, "--metrics=top2_accuracy"],
    [*AGAIN, "--dataset-options.shape=[10, 10, 1]"],
    [*AGAIN, "--accumulation=99"],
    [*AGAIN, "--save=pictures"],
    [*AGAIN, "--trace=trace"],
    ["--resume=runs/a/checkpoint-00000016"],
    ["--resume=runs/b", "--epochs=3", "--batch-size=8"],
    # evaluating
    ["--evaluate-only", "--resume=runs/none"],
    [*TINY, "--evaluate-only", "--resume", "--output-dir=pictures"],
    [*AGAIN, "--evaluate-only", "--model=cnn", "--save=new/model.pydtnn", "--trace=new/trace"],
    [*TINY, "--evaluate-only", "--model=cnn", "--load=weights.safetensors", "--trace=new/trace"],
]
"""Trainings that do not begin."""

LAUNCH = ["--", "python", "-m", "pydtnn.train"]

OTHERS = {
    "launch": [["python"], [*LAUNCH, "--evaluate-only"], [*LAUNCH, "--resume=runs/none"]]
    + [[*LAUNCH, "--nonsense=3"]],
    "predict": [
        ["none.pydtnn", "pictures/train/ant/0.png"],
        ["model.pydtnn", "weights.safetensors", "--csv=new/p.csv"],
        ["runs/e", "pictures/train/ant/0.png"],
    ],
    "checkpoint": [["verify", "runs/damaged"], ["diff", "runs/damaged", "runs/a"]],
    "trace": [
        ["summary", "runs/a"],
        ["export", "runs/a", "--to=paraver", "--output=new/x.prv"],
        ["export", "trace", "--to=otf2", "--output=new/x"],
        ["replay", "trace", "--platform=cpu-1gbit"],
    ],
    "report": [
        ["runs/a", "--step=0:1", "--output=new/page.html"],
        ["runs/a", "--trace=none", "--output=new/page.html"],
    ],
    "runs": [["runs", "--sort=nonsense"], ["runs", "--diff", "a", "none"]],
    "oracle": [
        ["--model=mlp", "--platform=nonsense", "--csv=new/x.csv"],
        ["--model=mlp", "--platform=cpu-1gbit", "--ranks=0", "--csv=new/x.csv"],
    ],
    "search": [["none.yaml"], ["sampler.yaml"], ["option.yaml"], ["value.yaml"]]
    + [["other.yaml", "--study=study"], ["space.yaml", "--ranks-per-trial=2"]],
    "data": [
        ["pack", "none", "--output=new"],
        ["pack", "pictures/train", "--output=new", "--test-fraction=2"],
        ["pack", "pictures", "--output=shards", "--shard-size=much"],
        ["pack", "broken", "--output=shards"],
        ["verify", "pictures"],
        ["tokenizer", "run.yaml", "--vocabulary=3", "--output=new/t.json"],
    ],
    "interchange": [
        ["import", "none.onnx", "new.pydtnn"],
        ["import", "weights.safetensors", "pictures"],
        [*("import", "weights.safetensors", "model.pydtnn", "--model=cnn", "--shape=12,12,1")]
        + ["--classes=4"],
        ["export", "model.pydtnn", "new/x.onnx", "--names=hugging_face"],
        ["export", "model.pydtnn", "new/model.nonsense"],
    ],
    "calibrate": [
        ["--output=new/p.yaml", "--isa=nonsense"],
        ["--output=new/p.yaml", "--threads=0"],
    ],
    "comm": [["draw", "nonsense", "-np", "2", "--output=new.svg"]],
    "testing": [["none.py:Scheme"]],
}
"""Arguments of other commands."""

CASES = [(command, given) for command, cases in OTHERS.items() for given in cases]
CASES += [("train", given) for given in TRAINING]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with runs, models, traces, images, shards and a study, where commands run."""
    before, root = Path.cwd(), tmp_path_factory.mktemp("place")
    os.chdir(root)
    try:
        write_images(root / "pictures")
        shutil.copytree("pictures", "broken")
        (root / "broken" / "train" / "cat" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
        options = [*TINY, "--quiet"]
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
        for name, text in {
            "run": "model: mlp\n",
            "space": SPACE.format(epochs=1, lr="0.1", more="trials: 1"),
            "other": SPACE.format(epochs=1, lr="0.1, 0.2", more="trials: 1"),
            "sampler": SPACE.format(epochs=1, lr="0.1", more="sampler: nonsense"),
            "option": SPACE.format(epochs="1, nonsense: 3", lr="0.1", more=""),
            "value": SPACE.format(epochs=1, lr="0.1, -1", more=""),
        }.items():
            (root / f"{name}.yaml").write_text(text)
        assert run("data", ["pack", "pictures", "--output=shards"]) == 0
        if importlib.util.find_spec("optuna"):
            from pydtnn.tools.search.space import read_space
            from pydtnn.tools.search.study import SharedStudy

            SharedStudy(root / "study", read_space("space.yaml")).close()
        yield root
    finally:
        os.chdir(before)


def run(command: str, arguments: list[str]) -> int:
    """Call the main function of a command; return its exit status."""
    try:
        return module_of(command).main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def content(root: Path) -> dict[str, bytes | None]:
    """Every folder and the bytes of every file."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@each(("command", "arguments"), CASES, few=25)
def test_a_refused_command_changes_no_byte_of_any_folder(
    command, arguments, place, tmp_path, monkeypatch, capfd
):
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
def test_what_two_ranks_refuse_changes_no_byte_either(comm, place):
    options = [*TINY, "--quiet", "--resume", "--output-dir=runs/a", "--trace=new/trace"]
    config = parse([*options, "--epochs=3", "--global-batch-size=8"])
    before = comm.gather_object(content(place))[0]
    with pytest.raises(AgreedError, match="global batch size must be 16"):
        run_training(config, comm)
    assert comm.gather_object(content(place)) == [before, before]
