"""Whole training steps, ours beside PyTorch's: two processes that take turns, step by step.

    python benchmarks/step_time.py                      # ResNet-44, batch 64, 1 thread
    python benchmarks/step_time.py --models resnet44 mlp --threads 1 2 --steps 15

A step is forward, loss, backward and update (SGD with momentum) in float32. Columns: images/s of
both (median), the median of the ratios of neighbouring steps with its quartiles, and the growth of
resident memory over the imports. Without PyTorch installed, only our own column is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WARM_UP = 3

# model -> (input shape, classes, batch)
WORK = {
    "resnet44": ((32, 32, 3), 10, 64),
    "resnet44-128": ((32, 32, 3), 10, 128),
    "resnet20": ((32, 32, 3), 10, 64),
    "vgg16_bn": ((32, 32, 3), 10, 64),
    "cnn": ((28, 28, 1), 10, 64),
    "mlp": ((28, 28, 1), 10, 64),
    "resnet18": ((224, 224, 3), 1000, 8),
}


def resident(peak: bool = False) -> float:
    """Resident memory of this process in MB, now or at its peak."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def our_step(name: str, threads: int) -> tuple[Callable[[], None], float]:
    """Build our side: one training step, and the memory before anything was built."""
    import numpy as np

    from pydtnn.comm import create_communicator
    from pydtnn.comm.exchange import AllReduce
    from pydtnn.data import Batch
    from pydtnn.kernels import create_backend
    from pydtnn.model import Model
    from pydtnn.models import create_net
    from pydtnn.optimizers import SGD
    from pydtnn.trainer import Trainer

    before = resident()
    shape, classes, size = WORK[name]
    net = create_net(name.partition("-")[0], classes, shape)
    model = Model(net, shape, backend=create_backend("cpu", threads=threads))
    trainer = Trainer(
        model,
        SGD(0.01, momentum=0.9, weight_decay=1e-4),
        metrics=(),
        exchange=AllReduce(create_communicator("serial")),
    )
    trainer.exchange.start(model.buckets)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, *shape)).astype("float32")
    batch = Batch(x, rng.integers(classes, size=size), np.arange(size), 0, size)
    return lambda: trainer.train_step(batch), before


def torch_step(name: str, threads: int) -> tuple[Callable[[], None], float]:
    """Build PyTorch's side of the same work."""
    import numpy as np
    import torch
    from torch_twin import Twin, to_torch

    from pydtnn.model import Model
    from pydtnn.models import create_net

    torch.set_num_threads(threads)
    before = resident()
    shape, classes, size = WORK[name]
    twin = Twin(Model(create_net(name.partition("-")[0], classes, shape), shape))
    rng = np.random.default_rng(0)
    x = to_torch(rng.normal(size=(size, *shape)).astype("float32"))
    target = torch.from_numpy(rng.integers(classes, size=size))
    optimizer = torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(x), target).backward()
        optimizer.step()

    return step, before


def serve(side: str, name: str, threads: int) -> None:
    """Answer each line of standard input with the seconds that one step took."""
    step, before = {"ours": our_step, "torch": torch_step}[side](name, threads)
    for _ in range(WARM_UP):
        step()
    print(resident(peak=True) - before, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


class Side:
    """A process that makes steps on demand."""

    def __init__(self, side: str, name: str, threads: int) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
        environment |= {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--serve", side, name, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.memory = self.answer()
        self.seconds: list[float] = []

    def answer(self) -> float:
        assert self.process.stdout
        return float(self.process.stdout.readline())

    def step(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.seconds.append(self.answer())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def compare(name: str, threads: int, steps: int, sides: list[str]) -> str:
    """Time one row of the table."""
    workers = [Side(side, name, threads) for side in sides]
    for _ in range(steps):
        for worker in workers:
            worker.step()
    for worker in workers:
        worker.close()
    batch = WORK[name][2]
    cells = [f"{name:13} {batch:5} {threads:7}"]
    for worker in workers:
        median = statistics.median(worker.seconds)
        cells.append(
            f"{batch / median:9.0f} {batch / min(worker.seconds):9.0f} {worker.memory:8.0f}"
        )
    if len(workers) == 2:
        pairs = zip(workers[1].seconds, workers[0].seconds, strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        low, _, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{statistics.median(ratios):6.2f} ({low:.2f} to {high:.2f})")
    return "  ".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        side, name, threads = args.serve
        serve(side, name, int(threads))
        return
    sides = ["ours"] + ["torch"] * (importlib.util.find_spec("torch") is not None)
    print(f"{machine()}; command: python {' '.join(sys.argv)}")
    head = " ".join(f"{s + ' img/s':>9} {'best':>9} {'MB':>8} " for s in sides)
    print(f"{'model':13} batch threads  {head}  ratio")
    for name in args.models:
        for threads in args.threads:
            print(compare(name, threads, args.steps, sides), flush=True)


def machine() -> str:
    """Name the processor and the versions."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        line = next((x for x in info.read_text().splitlines() if x.startswith("model name")), "")
        cpu = line.partition(":")[2].strip() or cpu
    torch = importlib.util.find_spec("torch")
    version = importlib.import_module("importlib.metadata").version("torch") if torch else "absent"
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, PyTorch {version}"


if __name__ == "__main__":
    main()
