"""Training with compressed gradients: accuracy, bytes and time of each compressor beside none.

    python -m benchmarks.comm.compression --data ~/data   # ResNet-20, CIFAR-10, 2 epochs, 2 ranks
    python -m benchmarks.comm.compression --only top_k-1% sign --runs 3 --epochs 10
    python -m benchmarks.comm.compression --model mlp --dataset synthetic --epochs 1

Every run is the command that users type, under mpirun: SGD with momentum 0.9 and weight decay 5e-4,
a global batch of 128, the learning rate rising to 0.4 and falling to 0; images of CIFAR-10 are
cropped and flipped. Runs differ in their seed; those of all compressors alternate.

Columns: accuracy and loss on the test set, means over the runs; what a rank sends in a step, in MB,
the start of training included; how many times less that is than without; time of a step and what of
it a rank spends inside communication calls, in ms, the least of all runs. Inside one host messages
cost next to nothing: there the table shows the price of compression, on a network its gain.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.report import Report

COMPRESSORS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {}),
    "float16": ("float16", {}),
    "bfloat16": ("bfloat16", {}),
    "int8": ("int8", {}),
    "top_k-1%": ("top_k", {"share": 0.01}),
    "random_k-25%": ("random_k", {"share": 0.25}),
    "sign": ("sign", {}),
    "power_sgd-2": ("power_sgd", {"rank": 2}),
}
RECIPE = [
    *("--global-batch-size", "128", "--optimizer", "sgd", "--momentum", "0.9"),
    *("--weight-decay", "5e-4", "--lr", "0.4", "--schedule", "triangular"),
    *("--threads", "1", "--checkpoint-every", ":epochs=0"),
]


class Run(NamedTuple):
    """What one training said of itself."""

    accuracy: float
    loss: float
    megabytes: float
    step: float
    communication: float


def train(args: argparse.Namespace, label: str, seed: int) -> Run:
    """Train once, and read what the run has printed and written."""
    name, options = COMPRESSORS[label]
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("compression: no mpirun; install pydtnn's extra `mpi`")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            *(mpirun, "-np", str(args.ranks), sys.executable, "-m", "pydtnn.train", *RECIPE),
            *("--model", args.model, "--dataset", args.dataset, "--epochs", str(args.epochs)),
            *("--seed", str(seed), "--output-dir", str(run)),
        ]
        if args.data:
            command += ["--data-dir", str(args.data)]
        if args.dataset.startswith("cifar"):
            command += ["--augment", "crop:4,flip"]
        if args.steps:
            command += ["--steps-per-epoch", str(args.steps)]
        if name:
            command += ["--compress", f"{name}:options={json.dumps(options)}"]
        kept = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
        environment = kept | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"compression: {label} failed:\n{done.stdout}{done.stderr}")
        last = json.loads((run / "history.json").read_text())[-1]
        steps = args.epochs * json.loads((run / "run.json").read_text())["steps_per_epoch"]

    def told(line: str) -> float:
        (number,) = re.findall(rf"^{line} +([\d.]+) ", done.stdout, re.M)
        return float(number)

    communication = told("time in communication")
    return Run(
        last["val_accuracy"],
        last["val_loss"],
        told("exchanged per rank") / steps,
        1e3 * (told("time in compute") + communication) / steps,
        1e3 * communication / steps,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data", type=Path, help="folder of the data set; else $PYDTNN_DATA")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of an epoch; by default all there are")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", choices=COMPRESSORS, help="these compressors, and none"
    )
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be at least 2: one alone sends nothing")
    labels = [label for label in COMPRESSORS if not args.only or label in {"none", *args.only}]
    report = Report(args.output)
    report.line(
        f"{args.model} on {args.dataset}, {args.epochs} epochs, {args.ranks} ranks of 1 thread, "
        f"{args.runs} run{'s' * (args.runs > 1)}"
    )
    titles = ("accuracy", "loss", "MB/step", "ratio", "ms/step", "waiting")
    report.line(f"\n{'':14}" + "".join(f"{title:>10}" for title in titles))
    runs: dict[str, list[Run]] = {label: [] for label in labels}
    for seed in range(args.runs):
        for label, results in runs.items():
            results.append(train(args, label, seed))
            if seed == args.runs - 1:
                report.line(f"{label:14}{row(results, runs['none'])}")


def row(results: list[Run], plain: list[Run]) -> str:
    """What all runs of a compressor come to, beside those without."""
    accuracy, loss, megabytes, *_ = map(statistics.mean, zip(*results, strict=True))
    *_, step, communication = map(min, zip(*results, strict=True))
    ratio = plain[0].megabytes / megabytes
    return (
        f"{accuracy:10.4f}{loss:10.4f}{megabytes:10.4f}{ratio:10.1f}"
        f"{step:10.1f}{communication:10.1f}"
    )


if __name__ == "__main__":
    main()
