"""Two ladders of kernels, from the definition to what libraries do.

    python lessons/kernels/ladder.py [--plot FILE]

Every rung is a C file, whose first lines say what it changes, why that is faster, and what limits
it. All are compiled for this machine, compared with NumPy on awkward sizes, and timed on one thread
beside the roofline: the smaller of the peak of the arithmetic units, and of the operations for each
byte that must be moved at least times the bandwidth of memory (Williams, Waterman and Patterson,
"Roofline", 2009). The last rungs are compared with NumPy and with the kernels of this library.

All do the same work in a call: arrays in, arrays out, in the same order in memory; frames of zeros,
packing and the transforms of filters are included. Calls alternate, and the least time of each
counts, so that other processes disturb all alike. Rates are those of the operations of the
definition: Winograd's algorithms do fewer, and exceed the roof.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # before NumPy is imported

import numpy as np

Array = np.ndarray

FOLDER = Path(__file__).parent
FLAGS = ["-O2", "-ftree-vectorize", "-ffp-contract=fast", "-shared", "-fPIC"]
PRODUCTS = sorted(path.stem for path in FOLDER.glob("product_*.c"))
CONVOLUTIONS = sorted(path.stem for path in FOLDER.glob("conv_*.c"))

PRODUCT = (768, 768, 768)
"""Rows, columns and depth of the product that is timed."""

IMAGES = (8, 32, 32, 64, 64)
"""Images, height, width, channels of input and output of the convolution that is timed."""

LEAST_S = 0.6
"""CPU time of the measurements of each call."""

AWKWARD: dict[str, list[tuple[int, ...]]] = {
    "product": [(1, 1, 1), (7, 37, 13), (31, 64, 300)],
    "conv": [(1, 4, 5, 1, 16), (2, 7, 6, 3, 32), (17, 4, 4, 5, 16), (1, 12, 30, 16, 48)],
}

MAX_ERROR = 1e-6
"""Largest error of awkward sizes in norm. Sums of products in order have up to 3e-7, the larger
tiles of Winograd's algorithm 6e-7; one output that is not computed gives 1e-3 and more."""


def compiled(name: str, folder: str, target: Sequence[str] = ("-march=native",)) -> Any:
    """Compile a rung for this machine, or for another target that it supports, and load it."""
    library = f"{folder}/{name}.so"
    subprocess.run(["cc", *FLAGS, *target, "-o", library, f"{FOLDER}/{name}.c"], check=True)
    return ctypes.CDLL(library)


def pointers(*arrays: Array) -> list[ctypes.c_void_p]:
    """Return the arrays as arguments of a C function."""
    return [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]


def product_of(library: Any, m: int, n: int, k: int) -> tuple[Callable[[], Any], Array, Array]:
    """Return a call of a product, the array that it writes, and what that must be, (m, n)."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    c = np.full((m, n), np.nan, np.float32)
    expected = a.astype(float) @ b
    arguments = [*pointers(a, b, c), m, n, k]
    return lambda: (library.product(*arguments), a, b)[0], c, expected


def conv_of(
    library: Any, n: int, h: int, w: int, c: int, o: int
) -> tuple[Callable[[], Any], Array, Array]:
    """Return a call of a convolution, the array that it writes, and what that must be."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, h, w, c), np.float32)
    f = rng.standard_normal((3, 3, c, o), np.float32)
    y = np.full((n, h, w, o), np.nan, np.float32)
    framed = np.pad(x.astype(float), ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = sum(framed[:, i : i + h, j : j + w] @ f[i, j] for i in range(3) for j in range(3))
    arguments = [*pointers(x, f, y), n, h, w, c, o]
    if hasattr(library, "conv_norm_relu"):
        scale, shift = rng.standard_normal((2, o), np.float32)
        expected = np.maximum(expected * scale + shift, 0)
        more = pointers(scale, shift)
        return (
            lambda: (library.conv_norm_relu(*arguments, *more), x, f, scale, shift)[0],
            y,
            expected,
        )
    return lambda: (library.conv(*arguments), x, f)[0], y, expected


def check(name: str, library: Any) -> None:
    """Raise AssertionError if a rung does not compute what NumPy does, on awkward sizes."""
    kind = name.partition("_")[0]
    for sizes in AWKWARD[kind]:
        call, result, expected = (product_of if kind == "product" else conv_of)(library, *sizes)
        call()
        error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
        assert error <= MAX_ERROR, f"{name}{sizes}: error {error}"


def seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the least CPU time of each call, in s. They alternate."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    while pending := [i for i, t in enumerate(times) if len(t) < 3 or sum(t) < LEAST_S]:
        for i in pending:
            begin = time.thread_time()
            calls[i]()
            times[i].append(time.thread_time() - begin)
    return [min(t) for t in times]


def of_numpy() -> dict[str, Callable[[], Any]]:
    """Return a call of NumPy's product with the sizes of the ladder."""
    m, n, k = PRODUCT
    a, b, c = (np.ones(shape, np.float32) for shape in ((m, k), (k, n), (m, n)))
    return {"NumPy": lambda: np.matmul(a, b, out=c)}


def of_library() -> dict[str, Callable[[], Any]]:
    """Return calls of pydtnn's convolution with the sizes of the ladder, if it is installed."""
    try:
        from pydtnn.kernels import create_backend
        from pydtnn.kernels.geometry import ConvGeometry
    except ImportError:
        return {}
    n, h, w, c, o = IMAGES
    geometry = ConvGeometry((h, w), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), c, o, 1)
    forward = create_backend(threads=1).conv.forward
    rng = np.random.default_rng(0)
    x, f = rng.standard_normal((n, h, w, c), np.float32), np.ones((o, 3, 3, c), np.float32)
    y, shift = np.empty((n, h, w, o), np.float32), np.zeros(o, np.float32)
    return {
        "pydtnn": lambda: forward(x, f, None, geometry, out=y),
        "pydtnn fused": lambda: forward(x, f, shift, geometry, out=y, relu=True),
    }


def climb(
    names: Sequence[str],
    flops: float,
    least_bytes: float,
    libraries: dict[str, Callable[[], Any]],
    folder: str,
) -> tuple[float, dict[str, float]]:
    """Check and time the rungs of a ladder beside libraries, and print a table.

    Returns
    -------
    roof : float
        FLOP/s of the roofline.
    rates : dict of str to float
        FLOP/s by rung or library.
    """
    calls: dict[str, Callable[[], Any]] = {}
    rounds = 100_000  # as short as a fast rung
    for name in names:
        library = compiled(name, folder)
        check(name, library)
        product = name.startswith("product")
        call, *_ = product_of(library, *PRODUCT) if product else conv_of(library, *IMAGES)
        calls[name] = call
    calls |= libraries
    peak = compiled("peak", folder)
    peak.peak.argtypes, peak.peak.restype = [ctypes.c_long], ctypes.c_float
    source = np.ones(4 << 20, np.float32)
    copy = np.empty_like(source)
    units, memory, *times = seconds(
        [lambda: peak.peak(rounds), lambda: np.copyto(copy, source), *calls.values()]
    )
    units, memory = rounds * peak.flops() / units, 2 * source.nbytes / memory
    limit = min(units, flops / least_bytes * memory)
    print(f"roof {limit / 1e9:.0f} GFLOP/s: units {units / 1e9:.0f} GFLOP/s, memory", end=" ")
    print(f"{memory / 1e9:.1f} GB/s at {flops / least_bytes:.0f} FLOP/B")
    rates = {name: flops / t for name, t in zip(calls, times, strict=True)}
    for name, rate in rates.items():
        faster, share = rate / rates[names[0]], rate / limit
        print(f"{name:22}{rate / 1e9:9.2f} GFLOP/s {faster:7.1f} x {share:6.0%} of the roof")
    return limit, rates


def draw(ladders: dict[str, tuple[float, dict[str, float]]], path: str) -> None:
    """Draw the rates of all rungs beside the roofs to a file. Requires Matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(rates) for _, rates in ladders.values()]
    figure, panels = pyplot.subplots(
        len(ladders),
        sharex=True,
        figsize=(7, 0.3 * sum(heights) + 1.5),
        height_ratios=heights,
        layout="constrained",
    )
    for axes, (title, (roof, rates)) in zip(panels, ladders.items(), strict=True):
        names = [name.partition("_")[2].replace("_", " ") or name for name in rates]
        colors = ["0.4" if "_" in name else "0.7" for name in rates]
        bars = axes.barh(names, [rate / 1e9 for rate in rates.values()], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3, backgroundcolor="white", fontsize=8)
        axes.axvline(roof / 1e9, color="black", linestyle="--", zorder=0)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_title(f"{title}, roof {roof / 1e9:.0f} GFLOP/s", fontsize=10)
    panels[-1].set_xlabel("GFLOP/s of the definition's operations, one thread")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Climb both ladders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plot", metavar="FILE", help="draw the rates to this file")
    options = parser.parse_args()
    m, n, k = PRODUCT
    images, h, w, c, o = IMAGES
    with tempfile.TemporaryDirectory() as folder:
        title = f"product ({m}, {k}) x ({k}, {n})"
        print(f"{title}, float32, one thread")
        moved = 4 * (m * k + k * n + m * n)
        ladders = {title: climb(PRODUCTS, 2.0 * m * n * k, moved, of_numpy(), folder)}

        title = f"convolution 3x3 of {images} images {h} x {w}, {c} to {o} channels"
        print(f"\n{title}")
        flops, moved = 2.0 * 9 * images * h * w * c * o, 4 * (images * h * w * (c + o) + 9 * c * o)
        ladders[title] = climb(CONVOLUTIONS, flops, moved, of_library(), folder)
    if options.plot:
        draw(ladders, options.plot)


if __name__ == "__main__":
    main()
