"""One recipe, two libraries: ResNet-44 on CIFAR-10 on one GPU, test accuracy and wall time of both.

    python benchmarks/gpu_cifar.py --data FOLDER --epochs 30 --peers eager compiled

Both sides begin with the same weights and see the same batches in the same order, cropped and
flipped alike, from the same loader; SGD with momentum under a triangular learning rate, weight
decay of all but biases and norms, label for label the same loss. PyTorch runs eager or compiled,
channels_last, cudnn.benchmark, fused SGD. A side is a process of its own. Seconds are those of
training from the first batch to the last, graphs and compilation included, and of the one
evaluation at the end, apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_work import DTYPES, PEERS
from report import WITH_TORCH, Report

from pydtnn.data import Dataset, Loader, create_augmentations, load_dataset
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.schedules import get_schedule

BATCH, LR, MOMENTUM, DECAY = 128, 0.4, 0.9, 5e-4
AUGMENT = "crop:4,flip"
THREADS = 6  # that prepare batches, for each side


def network(train: Dataset, **options: Any) -> Model:
    """Make the model with its initial weights, which depend on its names alone."""
    net = create_net("resnet44", train.classes, train.input_shape)
    return Model(net, train.input_shape, **options)


def schedule(train: Dataset, epochs: int) -> Any:
    """Make the learning rate as a function of the step."""
    steps = -(-len(train) // BATCH)
    return get_schedule("triangular", LR, epochs * steps, steps)


def ours(train: Dataset, test: Dataset, epochs: int, dtype: str) -> tuple[float, float, float]:
    """Train with pydtnn; return the accuracy and the seconds of training and evaluation."""
    from pydtnn.comm import create_communicator
    from pydtnn.comm.exchange import AllReduce
    from pydtnn.kernels.cuda import create_cuda_backend
    from pydtnn.trainer import Trainer

    backend = create_cuda_backend(tf32=True)
    rule = SGD(schedule(train, epochs), momentum=MOMENTUM, weight_decay=DECAY)
    trainer = Trainer(
        network(train, backend=backend, dtype=dtype),
        rule,
        exchange=AllReduce(create_communicator("serial")),
    )
    start = time.perf_counter()
    trainer.fit(
        train,
        epochs=epochs,
        batch_size=BATCH,
        augment=create_augmentations(AUGMENT),
        loader_threads=THREADS,
    )
    backend.synchronize()
    trained = time.perf_counter()
    accuracy = trainer.evaluate(test, batch_size=1000)["accuracy"]
    return accuracy, trained - start, time.perf_counter() - trained


def theirs(
    train: Dataset, test: Dataset, epochs: int, dtype: str, peer: str
) -> tuple[float, float, float]:
    """Train with PyTorch; return the accuracy and the seconds of training and evaluation."""
    import torch
    from torch_twin import Twin, to_torch

    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    twin = Twin(network(train, backend="numpy", fuse=False)).cuda()
    call = torch.compile(twin, mode="reduce-overhead") if peer == "compiled" else twin
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    others = [p for p in twin.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        LR,
        momentum=MOMENTUM,
        fused=True,
    )
    rate, step = schedule(train, epochs), 0
    loader = Loader(
        train,
        global_batch_size=BATCH,
        augment=create_augmentations(AUGMENT),
        threads=THREADS,
        prefetch=2 * THREADS,
    )

    def output(x: np.ndarray, run: Any) -> Any:
        images = to_torch(x).pin_memory().to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
            return run(images)

    start = time.perf_counter()
    with loader:
        for epoch in range(epochs):
            for batch in loader.epoch(epoch):
                for group in optimizer.param_groups:
                    group["lr"] = rate(step)
                target = torch.from_numpy(batch.y).pin_memory().to("cuda", non_blocking=True)
                optimizer.zero_grad(set_to_none=True)
                loss = torch.nn.functional.cross_entropy(output(batch.x, call).float(), target)
                loss.backward()
                optimizer.step()
                step += 1
    torch.cuda.synchronize()
    trained = time.perf_counter()
    twin.eval()
    right = 0
    with torch.no_grad(), Loader(test, global_batch_size=1000, shuffle=False) as batches:
        for batch in batches.epoch(0):
            chosen = output(batch.x, twin).argmax(dim=1).cpu().numpy()
            right += int((chosen == batch.y).sum())
    return right / len(test), trained - start, time.perf_counter() - trained


def serve(side: str, folder: str, epochs: int, dtype: str) -> None:
    """Be a side: train, and print what came of it."""
    answers, sys.stdout = sys.stdout, sys.stderr
    train, test = load_dataset("cifar10", data_dir=folder)
    if side == "ours":
        result = ours(train, test, epochs, dtype)
    else:
        result = theirs(train, test, epochs, dtype, side)
    print(json.dumps(result), file=answers)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", help="folder of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["eager"])
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--json", type=Path, help="file that receives the numbers")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        side, folder, epochs, dtype = args.serve
        serve(side, folder, int(epochs), dtype)
        return
    report = Report(args.output)
    report.line(f"ResNet-44, CIFAR-10, batch {BATCH}, {args.epochs} epochs, {args.dtype}")
    report.line(f"{'side':10}{'accuracy':>10}{'training':>11}{'evaluation':>12}")
    results: dict[str, list[float]] = {}
    for side in ("ours", *(args.peers if WITH_TORCH else ())):
        command = [sys.executable, __file__, "--serve", side, str(args.data), str(args.epochs)]
        done = subprocess.run([*command, args.dtype], stdout=subprocess.PIPE, text=True, check=True)
        accuracy, training, evaluation = results[side] = json.loads(done.stdout)
        report.line(f"{side:10}{accuracy:10.2%}{training:9.1f} s{evaluation:10.1f} s")
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
