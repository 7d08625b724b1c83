"""Folders of runs, written without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEPS = 20
EPOCHS = 3


def write_run(folder: Path, *, ranks: int = 1, lr: float = 0.1, **entries: Any) -> Path:
    """A run whose steps take 50 ms and whose ranks have 32 samples each."""
    folder.mkdir(parents=True)
    about = {
        "configuration": {"model": "mlp", "dataset": "synthetic", "lr": lr, "output_dir": "run"},
        "ranks": ranks,
        "threads": 1,
        "global_batch_size": 32 * ranks,
        "environment": {"python": "3.11.0", "cpu": {"name": "one <b>", "cores": 2}},
    }
    history = [
        {
            "epoch": i,
            "loss": 2 / i,
            "accuracy": 0.2 * i,
            "lr": lr,
            "val_loss": None,
            "val_accuracy": 0.1,
        }
        for i in range(1, EPOCHS + 1)
    ]
    (folder / "run.json").write_text(json.dumps(about | entries))
    (folder / "history.json").write_text(json.dumps(history))
    lines = [measured(epoch, ranks) for epoch in range(1, EPOCHS + 1)]
    (folder / "measurements.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def measured(epoch: int, ranks: int) -> dict[str, Any]:
    """A line of measurements.jsonl."""
    intervals = {
        "step": [*range(2, STEPS + 1, 2)],
        "seconds": [0.1] * 10,
        "samples": [64 * ranks] * 10,
        "loss": [2.0 - i / 10 for i in range(10)],
        "lr": [0.1] * 10,
    }
    rank = {"steps": 0.9, "communication": 0.2, "data": 0.1, "evaluation": 0.3, "total": 1.5}
    others = {"bytes": 1000, "peak_memory": 2 * 10**8}
    return {"epoch": epoch, "intervals": intervals, "ranks": [{**rank, **others}] * ranks}
