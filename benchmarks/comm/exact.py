"""Exact training: one checksum for any number of ranks and threads, and what it costs.

    python -m benchmarks.comm.exact --data FOLDER                       # needs CIFAR-10 and MPI
    python -m benchmarks.comm.exact --data FOLDER --model resnet44 --turns 5

First part: the same command over 1, 2, 3, 4, 5 and 8 ranks, with 1 and 2 threads, and once more
interrupted after step 10 with 4 ranks and resumed with 2. Training is 20 steps on 2500 images, the
last one with 68 instead of 128. The checksum is the SHA-256 of the last checkpoint's arrays:
weights, running statistics, optimizer state, sums of losses and metrics.

Second part: the time of a step in exact mode and without, measured alternately. Both train on the
same global batch; the exact one computes it in 8 shards, one by one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.report import Report
from pydtnn.data.order import assign_shards
from pydtnn.training.checkpoint import find_checkpoints

BATCH, SHARDS, STEPS = 128, 8, 20
RANKS = (1, 2, 3, 4, 5, 8)
MPIRUN = Path(sys.executable).with_name("mpirun")


def command(args: argparse.Namespace, folder: Path, *more: str) -> list[str]:
    """The training that both parts run, in a folder of its own."""
    return [
        *(sys.executable, "-m", "pydtnn.train", "--model", args.model, "--dataset", "cifar10"),
        *("--data-dir", str(args.data), "--augment", "crop:4,flip"),
        *("--epochs", "1", "--global-batch-size", str(BATCH), "--schedule", "constant"),
        *("--lr", "0.1", "--output-dir", str(folder), "--checkpoint-every", ":steps=10"),
        *more,
    ]


def run(ranks: int, threads: int, arguments: list[str]) -> str:
    """Run a command over so many ranks; return what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if ranks * threads > (os.cpu_count() or 1):
        environment["OMP_WAIT_POLICY"] = "passive"  # threads that spin keep others from working
    done = subprocess.run(
        [str(MPIRUN), "-np", str(ranks), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"exact: {' '.join(arguments)} over {ranks} ranks ended with: {done.stderr}")
    return done.stdout


def interrupt(ranks: int, arguments: list[str], folder: Path) -> None:
    """Start a command and end it as soon as it has saved step 10."""
    process = subprocess.Popen(
        [str(MPIRUN), "-np", str(ranks), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not find_checkpoints(folder):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    process.wait()
    left = [path.name for path in find_checkpoints(folder)]
    if len(left) != 1:
        sys.exit(f"exact: expected to interrupt a run after step 10, but it left {left}")


def checksum(folder: Path) -> str:
    """SHA-256 of the arrays in the last checkpoint."""
    (arrays,) = find_checkpoints(folder)[-1].glob("*.safetensors")
    return hashlib.sha256(arrays.read_bytes()).hexdigest()


def same_bytes(args: argparse.Namespace, report: Report) -> bool:
    """Print the checksum of every run; return whether all are the same."""
    report.line(f"{'ranks':>5} {'threads':>8} {'samples of a rank':>24}  SHA-256")
    found = set()
    for ranks in RANKS:
        rows = [assign_shards(BATCH, SHARDS, rank, ranks)[0] for rank in range(ranks)]
        samples = "/".join(str(one.stop - one.start) for one in rows)
        for threads in (1, 2):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "run"
                run(ranks, threads, command(args, folder, *exact()))
                found.add(checksum(folder))
                report.line(f"{ranks:>5} {threads:>8} {samples:>24}  {checksum(folder)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        interrupt(4, command(args, folder, *exact()), folder)
        run(2, 1, command(args, folder, *exact(), "--resume"))
        found.add(checksum(folder))
        report.line(f"4, then 2 from step 10 on, 1 thread:  {checksum(folder)}")
    report.line(f"{len(found)} checksum{'s' * (len(found) > 1)}")
    return len(found) == 1


def exact() -> list[str]:
    """The options of exact training on few images."""
    return ["--exact", f"shards={SHARDS}", "--validation-split", "0.95"]


def step_time(args: argparse.Namespace, ranks: int, threads: int, *more: str) -> float:
    """Seconds of a training step, from the samples/s of the run's report."""
    short = ["--tuning", "fixed", "--validation-split", "0.02", "--steps-per-epoch", "60"]
    with tempfile.TemporaryDirectory() as name:
        said = run(ranks, threads, command(args, Path(name) / "run", *short, *more))
    (rate,) = re.findall(r"^samples/s +(\d+)$", said, re.MULTILINE)
    return BATCH / int(rate)


def price(args: argparse.Namespace, report: Report) -> None:
    """Print the time of a step with and without exactness."""
    cores = os.cpu_count() or 1
    report.line(f"\n{'ranks':>5} {'threads':>8} {'fast ms':>9} {'exact ms':>9} {'price':>6}")
    for ranks, threads in dict.fromkeys([(1, 1), (1, cores), (cores, 1)]):
        fast, slow = [], []
        for _ in range(args.turns):
            fast.append(step_time(args, ranks, threads))
            slow.append(step_time(args, ranks, threads, "--exact", f"shards={SHARDS}"))
        a, b = statistics.median(fast), statistics.median(slow)
        report.line(f"{ranks:>5} {threads:>8} {1e3 * a:>9.1f} {1e3 * b:>9.1f} {b / a:>6.2f}")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--turns", type=int, default=5, help="runs of each kind in the second part")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    args = parser.parse_args()
    os.environ.pop("OPENBLAS_CORETYPE", None)
    report = Report(args.output)
    same = same_bytes(args, report)
    price(args, report)
    sys.exit(not same)


if __name__ == "__main__":
    main()
