"""Virtual time to an accuracy over ranks: the network of `mnist-99` with several schemes.

    python -m benchmarks.over_ranks --results over_ranks.jsonl --data-dir DATA
    python docs/figures.py ranks ranks.png            # of benchmarks/results/over_ranks.jsonl

Each run is one of `python -m pydtnn.train --recipe mnist-99 --virtual-ranks`, with a constant rate
after 8 steps of warm-up. It ends at the first evaluation, of which there is one every 8 steps, that
reaches the accuracy. With seed 0 each way is trained at each of `RATES`, on 4 ranks for up to 4 and
on 16 for more, and validated on a tenth of the training images. The rate that is there first trains
the further seeds, which are evaluated on the test images. Complete runs are appended to the file of
--results, and a further call continues after them. Times do not depend on the machine. Options that
are not those of this program are options of training.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

OPTIONS = (
    "--recipe=mnist-99 --platform=cpu-10gbit --allreduce=vendor --global-batch-size=512 "
    "--steps-per-epoch=8 --schedule=constant --warmup-epochs=1 --checkpoint-every=:epochs=0 --quiet"
)
WAYS = {
    "all-reduce": "",
    "PowerSGD": "--compress=power_sgd",
    "local SGD": "--scheme=local_sgd:period=8",
    "DiLoCo": "--scheme=diloco:period=8,momentum=0.5",
}
"""Options of all runs, and of each way to train."""

RATES = (0.15, 0.3, 0.6)
TARGET, EPOCHS = 0.98, 14
"""Accuracy at which a run ends, and the number of evaluations after which it ends without it."""

Row = dict[str, Any]


def train(ranks: int, way: str, rate: float, seed: int, options: list[str]) -> Row:
    """Train until the accuracy is reached; return steps, seconds, those of waiting, and MB sent."""
    with TemporaryDirectory() as folder:
        own = (
            f"--virtual-ranks={ranks} --lr={rate} --seed={seed} --epochs={EPOCHS} "
            f"--stop-at={TARGET} --validation-split={0 if seed else 0.1} --output-dir={folder}"
        )
        command = [*f"-m pydtnn.train {OPTIONS} {own} {WAYS[way]}".split(), *options]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "measurements.jsonl").read_text().splitlines()
        last = json.loads((Path(folder) / "history.json").read_text())[-1]
    parts = [json.loads(line)["ranks"][0] for line in lines]
    return {
        **{"ranks": ranks, "way": way, "rate": rate, "seed": seed, "steps": 8 * len(parts)},
        "seconds": round(last["virtual_seconds"], 6),
        "waiting": round(sum(part["communication"] for part in parts), 6),
        "mb": round(sum(part["bytes"] for part in parts) / 1e6, 3),
        "accuracy": round(last["val_accuracy"], 5),
    }


def until(row: Row) -> tuple[float, float]:
    """Return the seconds until the accuracy, infinity if it is not reached, and what is missing."""
    missing = max(TARGET - row["accuracy"], 0.0)
    return math.inf if missing else row["seconds"], missing


def main() -> None:
    """Train what is missing in the results, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 16, 64])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, required=True, help="file of runs, JSON lines")
    given, options = parser.parse_known_args()
    given.results.touch()
    known = [json.loads(line) for line in given.results.read_text().splitlines()]

    def run(*key: Any) -> Row:
        for row in known:
            if (row["ranks"], row["way"], row["rate"], row["seed"]) == key:
                return row
        known.append(train(*key, options))
        with given.results.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        return known[-1]

    print(f"{'ranks':>5} {'way':10} {'rate':>5} ms/step waiting MB/step {'steps':>12}  seconds")
    for ranks in given.ranks:
        for way in WAYS if ranks > 1 else ["all-reduce"]:
            tried = [run(min(max(ranks, 4), 16), way, rate, 0) for rate in RATES]
            rate = min(tried, key=until)["rate"]
            rows = [run(ranks, way, rate, seed) for seed in range(1, 1 + given.seeds)]
            parts = [rows[0][name] / rows[0]["steps"] for name in ("seconds", "waiting", "mb")]
            cells = "".join(f"{part:8.3f}" for part in (1e3 * parts[0], 1e3 * parts[1], parts[2]))
            steps = "/".join(str(row["steps"]) for row in rows)
            print(f"{ranks:5} {way:10} {rate:5}{cells} {steps:>12}", end="  ")
            print(statistics.median(until(row)[0] for row in rows))


if __name__ == "__main__":
    main()
