"""Two ladders of kernels, from the definition to what libraries do.

    python lessons/kernels/ladder.py [--plot FILE]

Every rung is a C file, whose first lines say what it changes, why that is faster, and what limits
it. All are compiled for this machine, compared with NumPy on awkward sizes, and timed on one thread
beside the roofline: the smaller of the peak of the arithmetic units, and of the operations for each
byte that must be moved at least times the bandwidth of memory (Williams, Waterman and Patterson,
"Roofline", 2009). The best rungs are compared with NumPy and with this library.
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
FLAGS = ["-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
PRODUCTS = sorted(path.stem for path in FOLDER.glob("product_*.c"))
CONVOLUTIONS = sorted(path.stem for path in FOLDER.glob("conv_*.c"))

PRODUCT = (768, 768, 768)
"""Rows, columns and depth of the product that is timed."""

IMAGES = (8, 32, 32, 64, 64)
"""Images, height, width, channels of input and output of the convolution that is timed."""

AWKWARD = {
    "product": [(1, 1, 1), (7, 37, 13), (31, 64, 300)],
    "conv": [(1, 2, 2, 1, 16), (2, 8, 6, 3, 32), (1, 12, 30, 16, 48)],
}


def compiled(name: str, folder: str, compiler: str = "cc") -> Any:
    """Compile a rung and load it."""
    library = f"{folder}/{name}.so"
    subprocess.run([compiler, *FLAGS, "-o", library, f"{FOLDER}/{name}.c"], check=True)
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
    x = np.zeros((n, h + 2, w + 2, c), np.float32)
    x[:, 1:-1, 1:-1] = rng.standard_normal((n, h, w, c))
    f = rng.standard_normal((3, 3, c, o), np.float32)
    y = np.full((n, h, w, o), np.nan, np.float32)
    expected = sum(
        x[:, i : i + h, j : j + w].astype(float) @ f[i, j] for i in range(3) for j in range(3)
    )
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
        scale = np.sqrt(sizes[-1] if kind == "product" else 9 * sizes[3])
        error = float(np.max(np.abs(result - expected))) / scale
        assert error <= 1e-5, f"{name}{sizes}: error {error}"


def seconds(call: Callable[[], Any], least: float = 0.2) -> float:
    """Return the least time of a call of several, in s."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def roof(folder: str) -> tuple[float, float]:
    """Return FLOP/s of the arithmetic units, and B/s of memory: of a copy of 64 MiB."""
    library, rounds = compiled("peak", folder), 2_000_000
    library.peak.argtypes, library.peak.restype = [ctypes.c_long], ctypes.c_float
    units = rounds * library.flops() / seconds(lambda: library.peak(rounds))
    source = np.ones(16 << 20, np.float32)
    copy = np.empty_like(source)
    return units, 2 * source.nbytes / seconds(lambda: np.copyto(copy, source))


def of_library() -> Callable[[], Any] | None:
    """Return a call of pydtnn's convolution with the sizes of the ladder, if it is installed."""
    try:
        from pydtnn import Model, layers
        from pydtnn.kernels import create_backend
    except ImportError:
        return None
    n, h, w, c, o = IMAGES
    layer = layers.Conv2d(o, 3, padding=1, bias=False)
    model = Model(layers.Sequential(layer), (h, w, c), backend=create_backend(threads=1))
    x = np.random.default_rng(0).standard_normal((n, h, w, c), np.float32)
    context = layers.StepContext(training=False)
    return lambda: model.forward(x, context)


def climb(names: Sequence[str], flops: float, least_bytes: float, folder: str) -> dict[str, float]:
    """Check and time the rungs of a ladder, print a table, and return FLOP/s by rung."""
    units, memory = roof(folder)
    limit = min(units, flops / least_bytes * memory)
    print(f"roof {limit / 1e9:.0f} GFLOP/s: units {units / 1e9:.0f} GFLOP/s, memory", end=" ")
    print(f"{memory / 1e9:.1f} GB/s at {flops / least_bytes:.0f} FLOP/B")
    rates: dict[str, float] = {}
    for name in names:
        library = compiled(name, folder)
        check(name, library)
        product = name.startswith("product")
        call, *_ = product_of(library, *PRODUCT) if product else conv_of(library, *IMAGES)
        rates[name] = flops / seconds(call)
        faster = rates[name] / next(iter(rates.values()))
        share = rates[name] / limit
        print(f"{name:22}{rates[name] / 1e9:9.2f} GFLOP/s {faster:7.1f} x {share:6.0%} of the roof")
    return rates


def draw(rates: dict[str, float], path: str) -> None:
    """Draw the rates of all rungs to a file. Requires Matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.35 * len(rates) + 1), layout="constrained")
    names = [name.replace("_", " ") for name in rates]
    axes.barh(names, [rate / 1e9 for rate in rates.values()], color="0.4")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("GFLOP/s, one thread")
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
        print(f"product ({m}, {k}) x ({k}, {n}), float32, one thread")
        flops = 2.0 * m * n * k
        rates = climb(PRODUCTS, flops, 4 * (m * k + k * n + m * n), folder)
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        rates["product of NumPy"] = flops / seconds(lambda: a @ b)
        print(f"{'NumPy':22}{rates['product of NumPy'] / 1e9:9.2f} GFLOP/s\n")

        print(f"convolution 3x3 of {images} images {h} x {w}, {c} to {o} channels")
        flops = 2.0 * 9 * images * h * w * c * o
        rates |= climb(CONVOLUTIONS, flops, 4 * (images * h * w * (c + o) + 9 * c * o), folder)
        if library := of_library():
            rates["conv of pydtnn"] = flops / seconds(library)
            print(f"{'pydtnn':22}{rates['conv of pydtnn'] / 1e9:9.2f} GFLOP/s")
    if options.plot:
        draw(rates, options.plot)


if __name__ == "__main__":
    main()
