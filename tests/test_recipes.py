"""The blocks of docs/recipes.md run, are as short as promised, and do what their titles say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.train import main
from tests.digits import needs_digits

pytestmark = needs_digits

DOC = Path(__file__).parent.parent / "docs" / "recipes.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", DOC.read_text(), re.DOTALL))
PRELUDE = BLOCKS.pop("prelude")
AFTER = {"predict": "save"}
"""Blocks that need files of another one."""


def logs(names: dict[str, Any]) -> dict[str, float]:
    """The last results of the trainer of a block."""
    return names["trainer"].history[-1]


def _png(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for kind in ("cat", "dog"):
            place = folder / "pictures" / part / kind
            place.mkdir(parents=True)
            for i in range(3):
                pixels = rng.integers(0, 256, (6, 6, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")


def _run(folder: Path) -> None:
    options = "--model mlp --dataset digits --epochs 3 --batch-size 32 --quiet"
    assert main([*options.split(), f"--output-dir={folder / 'runs' / 'mlp-digits-1'}"]) == 0


BEFORE: dict[str, Callable[[Path], None]] = {"folder": _png, "shards": _png, "load_run": _run}

CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "arrays": lambda names: logs(names)["val_accuracy"] > 0.75,
    "folder": lambda names: names["held"].class_names == ("cat", "dog") and len(names["held"]) == 6,
    "shards": lambda names: len(names["data"]) == 6 and len(names["trainer"].history) == 2,
    "text": lambda names: logs(names)["val_perplexity"] < 5,
    "cross_validation": lambda names: len(names["scores"]) == 4 and min(names["scores"]) > 0.8,
    "class_weights": lambda names: logs(names)["val_accuracy"] > 0.3,
    "weighted": lambda names: logs(names)["val_accuracy"] > 0.7,
    "segmentation": lambda names: logs(names)["val_iou"] > 0.5,
    "multi_label": lambda names: logs(names)["val_f1"] > 0.85 and names["labels"].shape == (5, 3),
    "function": lambda names: len(names["steps"]) == len(names["trainer"].losses),
    "best": lambda names: names["patient"].best > 0.85,
    "mix": lambda names: logs(names)["val_accuracy"] > 0.5,
    "two_outputs": lambda names: logs(names)["output0.accuracy"] > 0.5,
    "shared": lambda names: len(names["model"].parameters) == 8,
    "transformer": lambda names: logs(names)["val_accuracy"] > 0.5,
    "features": lambda names: names["found"]["head"].shape == (5, 10),
    "gradients": lambda names: names["model"].parameters["body.conv2d0.w"].grad.any(),
    "stop_at": lambda names: names["trainer"].epoch < 50 and logs(names)["val_accuracy"] >= 0.9,
    "find_lr": lambda names: 1e-4 < names["steepest"] < 10,
    "ema": lambda names: logs(names)["val_accuracy"] > 0.5,
    "new_head": lambda names: "head.w" not in names["model"].frozen,
    "fine_tune": lambda names: names["trainer"].epoch == 3 and not names["model"].frozen,
    "interchange": lambda names: len(names["again"].parameters) == len(names["model"].parameters),
    "oracle": lambda names: names["found"].seconds > 0,
    "virtual": lambda names: max(names["run"].seconds) > 0,
    "predict": lambda names: (names["scores"].argmax(axis=1) == names["labels"]).mean() > 0.7,
    "load_run": lambda names: names["value"] == names["history"]["val_accuracy"].max() > 0.5,
    "confusion": lambda names: names["matrix"].sum() == len(names["test"]),
    "curves": lambda names: len(names["trainer"].losses) == 4 * 23,
}
"""What must hold of a block's names, where the block's own assertions do not say it."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_recipe_does_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    if name == "load_run":
        pytest.importorskip("pydtnn.tools")
    if name in BEFORE:
        BEFORE[name](tmp_path)
    if name in AFTER:
        _in_another_process(BLOCKS[AFTER[name]], tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(PRELUDE + BLOCKS[name], f"<{name}>", "exec"), names)
    assert CHECKS.get(name, lambda names: True)(names)


def _in_another_process(block: str, folder: Path) -> None:
    command = [sys.executable, "-c", PRELUDE + block]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
