"""Memory-bound kernels as a fraction of the bandwidth of a copy, measured in turns with it.

    python benchmarks/bandwidth.py                    # float32, 1 thread
    python benchmarks/bandwidth.py --threads 2 --isa avx2 --only norm pool

Two sizes: the first activations of ResNet-44 at batch 64 (4 MB each, used again and again: warm),
and tensors of 256 MB (cold). Bytes are those that a kernel has to read and write, each once; GB/s
is for the median of the runs, and the ratio is to the median of copies of as many threads between
arrays of that size. More than 1 is possible, since writing a line that is not in cache also reads
it: kernels that mostly read beat a copy, those that mostly write fall behind it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod

import numpy as np
from step_time import machine

from pydtnn.kernels import Backend, PoolGeometry, create_backend

SHAPES = {"warm": (64, 32, 32, 16), "cold": (1024, 32, 32, 64)}
POOLS = {
    "2x2 stride 2": PoolGeometry((32, 32), (2, 2), (2, 2), ((0, 0), (0, 0)), 1),
    "3x3 stride 2": PoolGeometry((32, 32), (3, 3), (2, 2), ((1, 1), (1, 1)), 1),
}
ACTIVATIONS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh", "gelu", "silu", "log", "arctan")

Case = tuple[str, int, Callable[[], object]]
"""Name, bytes moved, call."""


class Arrays:
    """Tensors of one shape: input, gradient, output, and the state of an optimizer."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        rng = np.random.default_rng(0)
        self.shape = shape
        self.x = rng.standard_normal(shape, "float32").astype(dtype)
        self.dy, self.out = self.x[::-1].copy(), np.zeros_like(self.x)
        self.state = [np.zeros(prod(shape), dtype) for _ in range(2)]
        self.size = self.x.nbytes


def norm_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Batch norm in its four passes, group and layer norm."""
    norm, channels, n = backend.norm, a.shape[-1], a.size
    sums, two = np.zeros(1 + 2 * channels), np.zeros((2, channels))
    one = np.ones(channels, a.x.dtype)
    yield "statistics", n, lambda: norm.statistics(a.x, out=sums)
    yield "normalize", 2 * n, lambda: norm.normalize(a.x, one, one, out=a.out)
    yield (
        "backward_statistics",
        2 * n,
        lambda: norm.backward_statistics(a.x, a.dy, one, one, out=two),
    )
    yield (
        "backward_normalize",
        3 * n,
        lambda: norm.backward_normalize(a.x, a.dy, one, one, one, out=a.out),
    )
    for name, view, groups in (
        ("group", (a.shape[0], -1, channels), 4),
        ("layer", (-1, 1, 16 * channels), 1),
    ):
        x, dy, out = (array.reshape(view) for array in (a.x, a.dy, a.out))
        mean, inv_std = np.zeros((2, len(x), groups))
        weights = np.ones((4, x.shape[2]), a.x.dtype)

        def forward(x=x, out=out, mean=mean, inv_std=inv_std, w=weights, groups=groups):
            norm.group_forward(x, w[0], w[1], groups, 1e-5, out=out, mean=mean, inv_std=inv_std)

        def backward(x=x, dy=dy, out=out, mean=mean, r=inv_std, w=weights, groups=groups):
            norm.group_backward(x, dy, w[0], groups, mean, r, out=out, dgamma=w[2], dbeta=w[3])

        yield f"{name} forward", 2 * n, forward
        yield f"{name} backward", 3 * n, backward


def pool_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Maximum and mean over windows, and the global mean."""
    pool, batch, channels = backend.pool, a.shape[0], a.shape[-1]
    for name, pool_geometry in POOLS.items():
        g = replace(pool_geometry, channels=channels)
        small = (batch, *g.output, channels)
        y, index = np.zeros(small, a.x.dtype), np.zeros(small, "int32")
        both = y.nbytes + index.nbytes
        yield (
            f"max {name}",
            a.size + both,
            lambda g=g, y=y, i=index: pool.max_forward(a.x, g, out=y, index=i),
        )
        yield (
            f"max {name} backward",
            a.size + both,
            lambda g=g, y=y, i=index: pool.max_backward(y, i, g, out=a.out),
        )
        yield (
            f"average {name}",
            a.size + y.nbytes,
            lambda g=g, y=y: pool.average_forward(a.x, g, out=y),
        )
        yield (
            f"average {name} backward",
            a.size + y.nbytes,
            lambda g=g, y=y: pool.average_backward(y, g, out=a.out),
        )
    top = np.zeros((batch, 1, 1, channels), a.x.dtype)
    yield "global average", a.size, lambda: pool.adaptive_forward(a.x, out=top)
    yield "global average backward", a.size, lambda: pool.adaptive_backward(top, out=a.out)


def elementwise_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Activations, the sum of two arrays, softmax."""
    kernels = backend.elementwise
    yield "add", 3 * a.size, lambda: kernels.add(a.x, a.dy, out=a.out)
    for name in ACTIVATIONS:
        yield (
            name,
            2 * a.size,
            lambda name=name: kernels.forward(name, a.x, out=a.out, alpha=0.1),
        )
    for name in ("relu", "gelu"):
        yield (
            f"{name} backward",
            3 * a.size,
            lambda name=name: kernels.backward(name, a.dy, a.x, out=a.out),
        )
    x, dy, out = (array.reshape(-1, 1024) for array in (a.x, a.dy, a.out))
    yield "softmax of 1024", 2 * a.size, lambda: kernels.softmax_forward(x, out=out)
    yield "softmax backward", 3 * a.size, lambda: kernels.softmax_backward(dy, x, out=out)


def loss_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Cross-entropy and the squared error with their gradients."""
    loss = backend.loss
    logits, out = a.x.reshape(-1, 1024), a.out.reshape(-1, 1024)
    target = np.zeros(len(logits), "int64")
    yield (
        "cross_entropy of 1024",
        2 * a.size,
        lambda: loss.cross_entropy(logits, target, 0.0, 1.0, out=out),
    )
    yield "squared_error", 3 * a.size, lambda: loss.squared_error(a.x, a.dy, 1.0, out=a.out)


def update_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """The optimizers and the norm of the gradient."""
    update, w, g, (m, v) = backend.update, a.out.reshape(-1), a.dy.reshape(-1), a.state
    n = a.size
    yield (
        "sgd with momentum",
        5 * n,
        lambda: update.sgd(w, g, v, lr=0.0, decay=0.1, momentum=0.9, nesterov=False),
    )
    yield (
        "adam",
        7 * n,
        lambda: update.adam(
            w, g, m, v, lr=0.0, decay=0.1, step=1, beta1=0.9, beta2=0.999, epsilon=1e-8,
            decoupled=True,
        ),
    )  # fmt: skip
    yield "squared_norm", n, lambda: update.squared_norm(g)


def random_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Dropout."""
    samples = np.arange(a.shape[0])
    yield (
        "dropout",
        2 * a.size,
        lambda: backend.random.dropout(a.x, 0.5, 1, 2, 3, samples, out=a.out),
    )


FAMILIES = {
    "norm": norm_cases,
    "pool": pool_cases,
    "elementwise": elementwise_cases,
    "loss": loss_cases,
    "update": update_cases,
    "random": random_cases,
}


def seconds(call: Callable[[], object], repeat: int) -> float:
    """Time one call, as the mean of `repeat` in a row."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def copier(threads: int, out: np.ndarray, x: np.ndarray) -> Callable[[], object]:
    """A copy of `x` to `out` by so many threads."""
    if threads == 1:
        return lambda: np.copyto(out, x)
    pool = ThreadPoolExecutor(threads)
    parts = list(zip(np.array_split(out, threads), np.array_split(x, threads), strict=True))
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    backend = create_backend("cpu", threads=args.threads, isa=args.isa)
    print(f"{machine()}; {backend.isa}, {args.threads} threads; python {' '.join(sys.argv)}")
    for size in args.sizes:
        a = Arrays(SHAPES[size], args.dtype)
        repeat = max(1, 2**25 // a.size)
        copy = copier(args.threads, a.out, a.x)
        seconds(copy, 1)
        print(f"\n{size}: tensors of {a.size / 2**20:.0f} MB {a.shape}, median of {args.runs}")
        print(f"{'kernel':34} {'ms':>8} {'best ms':>8} {'GB/s':>7} {'copy':>7} {'ratio':>6}")
        for family in args.only:
            for name, moved, call in FAMILIES[family](backend, a):
                with np.errstate(all="ignore"):
                    seconds(call, 1)
                    pairs = [
                        (seconds(call, repeat), seconds(copy, repeat)) for _ in range(args.runs)
                    ]
                time_, copied = (statistics.median(column) for column in zip(*pairs, strict=True))
                best = min(pair[0] for pair in pairs)
                rate, peak = moved / time_ / 1e9, 2 * a.size / copied / 1e9
                print(
                    f"{family + ' ' + name:34} {1e3 * time_:8.3f} {1e3 * best:8.3f} "
                    f"{rate:7.1f} {peak:7.1f} {rate / peak:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
