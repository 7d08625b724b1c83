"""How long OpenMP's threads should wait for work before they sleep, on quiet cores and busy ones.

    python -m benchmarks.cpu.spin                    # the bound that is set, and GCC's own
    python -m benchmarks.cpu.spin --spins 1000 3000 10000 GCC --rounds 5

Method. Each setting of GOMP_SPINCOUNT gets a process of its own, as the runtime reads it once. The
process calls two kernels alternately with as many threads as cores: a ReLU of 40,000 elements, of
which a call takes microseconds, and a convolution, and does 30 us of Python between them, as a step
does. "busy" has a process beside it for each core that never rests. Settings alternate; the median
of all rounds is printed, and the tenth of the calls that take longest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import numpy as np

SECONDS = 1.5  # of one setting in one round
PYTHON = 30e-6  # s between two kernels
KERNELS = ("ReLU", "convolution")


def measure() -> dict[str, list[float]]:
    """Seconds of calls of both kernels."""
    from pydtnn.kernels import ConvGeometry, create_backend

    backend = create_backend("cpu", threads=len(os.sched_getaffinity(0)), tuning="fixed")
    rng = np.random.default_rng(0)
    g = ConvGeometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 32, 32)
    x = rng.normal(size=(16, 16, 16, 32)).astype("float32")
    w = rng.normal(size=g.weight_shape).astype("float32")
    y, small = np.empty_like(x), rng.normal(size=40_000).astype("float32")
    out = np.empty_like(small)
    runs = (
        lambda: backend.elementwise.forward("relu", small, out=out),
        lambda: backend.conv.forward(x, w, None, g, out=y),
    )
    times: dict[str, list[float]] = {name: [] for name in KERNELS}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for name, run in zip(KERNELS, runs, strict=True):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
            rest = time.perf_counter() + PYTHON
            while time.perf_counter() < rest:
                pass
    return times


def run(spins: str) -> dict[str, list[float]]:
    """`measure` in a process with a setting; "GCC" is what the runtime does by itself."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment["GOMP_SPINCOUNT"] = "300000" if spins == "GCC" else spins
    command = [sys.executable, "-m", "benchmarks.cpu.spin", "--measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {
        name: [float(word) for word in line.split()]
        for name, line in zip(KERNELS, done.stdout.splitlines(), strict=True)
    }


def main() -> None:
    """Print a line for each setting."""
    from pydtnn.kernels.cpu.openmp import SPINS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--spins", nargs="+", default=[SPINS, "GCC"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        for times in measure().values():
            print(*times)
        return
    print(
        f"{'cores':6}{'spins':>8}" + "".join(f"{k + ' us, median':>28}{'90 %':>9}" for k in KERNELS)
    )
    for cores in ("quiet", "busy"):
        busy = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in os.sched_getaffinity(0)
            if cores == "busy"
        ]
        try:
            found: dict[str, dict[str, list[float]]] = {
                s: {k: [] for k in KERNELS} for s in args.spins
            }
            for _ in range(args.rounds):
                for spins in args.spins:
                    for name, times in run(spins).items():
                        found[spins][name] += times
        finally:
            for process in busy:
                process.kill()
                process.wait()
        for spins, kernels in found.items():
            line = f"{cores:6}{spins:>8}"
            for times in kernels.values():
                tenth = statistics.quantiles(times, n=10)[-1]
                line += f"{statistics.median(times) * 1e6:28.1f}{tenth * 1e6:9.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
