"""Layers of sequences: both passes of LSTM, GRU and Conv1d, ours beside PyTorch's, step by step.

    python -m benchmarks.cpu.sequences                       # float32, 1 thread
    python -m benchmarks.cpu.sequences --layers lstm --threads 2 --dtype float64 --turns 51

A turn is forward and backward of one layer on a batch of random numbers, with the gradients of the
input and of all weights, through `Model` and through autograd. Both sides have the layout that
their library expects: (N, L, C) for ours and for recurrent layers of PyTorch, (N, C, L) for its
Conv1d. Turns alternate in one process. ms are medians, the ratio is the median of the ratios of
neighbouring turns, with their quartiles; GFLOP/s are those of the products, nominal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.report import WITH_TORCH, Report
from pydtnn.kernels import create_backend
from pydtnn.layers import GRU, LSTM, Conv1d, StepContext
from pydtnn.layers.blocks import Net
from pydtnn.model import Model

WARM_UP = 3  # turns of each side


class Case(NamedTuple):
    """A layer, and the shape of a sample."""

    batch: int
    length: int
    inputs: int
    outputs: int
    make: Callable[..., Net]
    options: dict[str, Any]  # of ours
    torch: str  # class of PyTorch
    theirs: dict[str, Any]


def recurrent(kind: Callable[..., Net], *sizes: int, **options: Any) -> Case:
    """A recurrent layer."""
    named = {"num_layers" if key == "layers" else key: value for key, value in options.items()}
    return Case(*sizes, kind, options, kind.__name__, named | {"batch_first": True})


def convolution(*sizes: int, kernel: int, **options: Any) -> Case:
    """A convolution of signals that keeps their length."""
    given: dict[str, Any] = {"kernel_size": kernel, "padding": kernel // 2, **options}
    return Case(*sizes, Conv1d, given, "Conv1d", given)


CASES = {
    "lstm": recurrent(LSTM, 32, 64, 128, 256),
    "lstm-2x2": recurrent(LSTM, 32, 64, 128, 128, layers=2, bidirectional=True),
    "lstm-wide": recurrent(LSTM, 64, 32, 512, 512),
    "gru": recurrent(GRU, 32, 64, 128, 256),
    "gru-2x2": recurrent(GRU, 32, 64, 128, 128, layers=2, bidirectional=True),
    "conv1d": convolution(32, 1024, 64, 64, kernel=5),
    "conv1d-first": convolution(32, 4096, 2, 32, kernel=7),
    "conv1d-depthwise": convolution(32, 1024, 64, 64, kernel=5, groups=64),
}


def ours(case: Case, dtype: str, threads: int) -> tuple[Callable[[], None], float]:
    """Return a turn of our side, and the operations of its products."""
    backend = create_backend("cpu", threads=threads)
    shape = (case.length, case.inputs)
    model = Model(
        case.make(case.outputs, **case.options),
        *(shape,),
        backend=backend,
        dtype=dtype,
        input_gradient=True,
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((case.batch, *shape)).astype(dtype)
    dy = rng.standard_normal((case.batch, *model.output_shape)).astype(dtype)
    context = StepContext(training=True, samples=np.arange(case.batch))

    def turn() -> None:
        _, saved = model.forward(x, context)
        model.backward(dy, saved)

    costs = [layer.cost(case.batch) for layer in model.layers]
    return turn, float(sum(cost.flops_forward + cost.flops_backward for cost in costs))


def theirs(case: Case, dtype: str, threads: int) -> Callable[[], None]:
    """Return a turn of PyTorch's side."""
    import torch

    torch.set_num_threads(threads)
    module = getattr(torch.nn, case.torch)(case.inputs, case.outputs, **case.theirs)
    module = module.to(getattr(torch, dtype))
    signal = case.torch == "Conv1d"
    size = (case.inputs, case.length) if signal else (case.length, case.inputs)
    x = torch.randn(case.batch, *size, dtype=getattr(torch, dtype), requires_grad=True)
    y = module(x)
    dy = torch.randn_like(y if signal else y[0])

    def turn() -> None:
        module.zero_grad()
        x.grad = None
        y = module(x)
        (y if signal else y[0]).backward(dy)

    return turn


def seconds(turn: Callable[[], None]) -> float:
    """Time of one turn in s."""
    start = time.perf_counter()
    turn()
    return time.perf_counter() - start


def row(name: str, dtype: str, threads: int, turns: int) -> str:
    """Measure a case."""
    case = CASES[name]
    own, flops = ours(case, dtype, threads)
    sides = [own, theirs(case, dtype, threads)] if WITH_TORCH else [own]
    for side in sides:
        for _ in range(WARM_UP):
            side()
    times = np.array([[seconds(side) for side in sides] for _ in range(turns)])
    medians = np.median(times, axis=0)
    size = f"{case.batch} x {case.length} x {case.inputs}->{case.outputs}"
    cells = [f"{name:17}{size:22}{dtype:9}{threads:7}", f"{flops / medians[0] / 1e9:9.1f}"]
    cells += [f"{1e3 * median:9.2f}" for median in medians]
    if WITH_TORCH:
        ratios = (times[:, 1] / times[:, 0]).tolist()
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{middle:7.2f} ({low:.2f} to {high:.2f})")
    return " ".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--layers", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--turns", type=int, default=21, help="of each side, at least 2")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    report = Report(args.output)
    sides = [f"{'ours ms':>9}", *[f"{'torch ms':>9}", f"{'ratio':>7}"] * WITH_TORCH]
    head = f"{'layer':17}{'batch x length':22}{'dtype':9}{'threads':>7} {'GFLOP/s':>9} "
    report.line(head + " ".join(sides))
    for name in args.layers:
        for threads in args.threads:
            report.line(row(name, args.dtype, threads, args.turns))


if __name__ == "__main__":
    main()
