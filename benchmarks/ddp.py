"""Data-parallel training: `pydtnn.train` under mpirun beside PyTorch's DistributedDataParallel.

    python benchmarks/ddp.py                               # ResNet-44, 2 ranks of 1 thread
    python benchmarks/ddp.py --ranks 4 --runs 5 --output benchmarks/results/ddp.txt

Ours is the command that users type, on synthetic images: reading, metrics and progress are part of
it. Theirs is the leanest loop there is (`channels_last`, gloo, one batch that stays in memory). The
batch is 64 per rank, the optimizer SGD with momentum. The sides run one after the other, again and
again, never at the same time: a rank that waits for a message keeps its core busy. A run is a few
epochs of 10 steps, of which the first does not count. Columns: images/s of all ranks, median over
the epochs of all runs; the ratio of each run's medians, as median (least to greatest); and the peak
of resident memory per rank, Python and libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import WITH_TORCH, Report
from work import WORK

STEPS = 10
"""Steps of an epoch: long enough to average, so short that many fit into a run."""


class Run:
    """What a run says of itself: images/s of each epoch but the first, MB per rank."""

    def __init__(self, rates: list[float], memory: float) -> None:
        self.rates = rates[1:]
        self.memory = memory
        self.rate = statistics.median(self.rates)


def environment(threads: int) -> dict[str, str]:
    """The variables of a rank."""
    kept = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    return kept | {"OMP_NUM_THREADS": str(threads)}


def run_ours(name: str, ranks: int, threads: int, epochs: int) -> Run:
    """Train with the command line under mpirun and read what it prints."""
    work = WORK[name]
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("ddp: no mpirun; install pydtnn's extra `mpi`")
    data = {"samples": STEPS * ranks * work.batch, "classes": work.classes, "shape": work.shape}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(mpirun, "-np", str(ranks), sys.executable, "-m", "pydtnn.train"),
            *("--model", work.net, "--batch-size", str(work.batch), "--threads", str(threads)),
            *("--dataset", "synthetic", "--dataset-options", json.dumps(data)),
            *("--epochs", str(epochs), "--steps-per-epoch", str(STEPS), "--lr", "0.01"),
            *("--checkpoint-epochs", "0", "--output-dir", str(Path(folder) / "run")),
        ]
        done = subprocess.run(command, env=environment(threads), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ddp: pydtnn.train failed:\n{done.stdout}{done.stderr}")
    rates = re.findall(r"^epoch .* val_loss .* ([\d.]+) images/s  [\d.]+ s$", done.stdout, re.M)
    (memory,) = re.findall(r"^peak memory per rank +([\d.]+) MB", done.stdout, re.M)
    return Run([float(rate) for rate in rates], float(memory))


def run_torch(name: str, ranks: int, threads: int, epochs: int) -> Run:
    """Start PyTorch's ranks and read what rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(threads) | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, __file__, "--serve", name, str(threads), str(epochs)]
    processes = [
        subprocess.Popen(
            command, env=variables | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("ddp: a rank of PyTorch's has failed; its error is above")
    answer = json.loads(answers[0])
    return Run(answer["rates"], answer["memory"])


def serve(name: str, threads: int, epochs: int) -> None:
    """Be a rank of PyTorch's: train, and on rank 0 print images/s of each epoch."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch_twin import Peer, plain_graph, to_torch

    torch.set_num_threads(threads)
    distributed.init_process_group("gloo")
    work, ranks = WORK[name], distributed.get_world_size()
    model = DistributedDataParallel(Peer(plain_graph(work.net, work.classes, work.shape)))
    images, classes = work.data()
    x, target = to_torch(images), torch.from_numpy(classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    rates = []
    for _ in range(epochs):
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
        rates.append(STEPS * ranks * work.batch / (time.perf_counter() - start))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # MB: Linux counts in KiB
    if distributed.get_rank() == 0:
        print(json.dumps({"rates": rates, "memory": 1.024 * memory}), flush=True)
    distributed.barrier()
    os._exit(0)  # PyTorch's threads sometimes abort a process that leaves in the usual way


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--epochs", type=int, default=4, help=f"of {STEPS} steps, in a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], *map(int, args.serve[1:]))
        return
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first does not count")
    sides = {"ours": run_ours} | ({"torch": run_torch} if WITH_TORCH else {})
    report = Report(args.output)
    cells = [f"{f'{side} images/s':>16}" for side in sides] + [f"{'ratio':>8} {'':14}"] * WITH_TORCH
    cells += [f"{f'{side} MB':>9}" for side in sides]
    report.line(f"{'model':13}{'ranks':>6}{'threads':>8}{'batch':>6} " + " ".join(cells))
    for name in args.models:
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for _ in range(args.runs):
            for side, run in sides.items():
                runs[side].append(run(name, args.ranks, args.threads, args.epochs))
        report.line(f"{name:13}{args.ranks:6}{args.threads:8}{WORK[name].batch:6} " + row(runs))


def row(runs: dict[str, list[Run]]) -> str:
    """Rates, ratio and memory of one model."""
    cells = [
        f"{statistics.median(rate for run in side for rate in run.rates):16.0f}"
        for side in runs.values()
    ]
    if "torch" in runs:
        pairs = zip(runs["ours"], runs["torch"], strict=True)
        ratios = sorted(ours.rate / theirs.rate for ours, theirs in pairs)
        cells.append(f"{statistics.median(ratios):8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    cells += [f"{max(run.memory for run in side):9.0f}" for side in runs.values()]
    return " ".join(cells)


if __name__ == "__main__":
    main()
