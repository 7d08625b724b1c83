"""Python's share of a training step: the time that passes outside of the compiled kernels.

    python -m benchmarks.cpu.overhead                          # ResNet-44 and the MLP, 1 thread
    python -m benchmarks.cpu.overhead --models cnn --layers    # and which layers and loops it is in

Method. Every kernel is a method of an extension class that a family of the backend holds; each is
replaced by a wrapper that adds up the time until it returns, so "kernels" is the time between entry
and return of compiled code, and "outside" the rest of the step. Three corrections, all printed:

- The wrapper's own time would count as outside; it is measured around a function that does
  nothing, and subtracted for each call.
- Converting arguments (buffers, checks, the release of the interpreter's lock) happens inside of
  the compiled methods and is no work of a kernel; it is measured with the addition of arrays of
  one element, and added to Python's share for each call.
- Collections of garbage, NumPy's arithmetic on coefficients, and taking and returning memory of
  arrays happen outside of kernels and are part of the share as they come.

Steps without wrappers follow those with them, so that the step's true time is seen, too. Steps are
repeated from a list of calls (`pydtnn.model.replay`), which is recorded anew with the wrappers. The
targets are 2 % for ResNet-44 and 25 % for the MLP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import Report
from benchmarks.common.work import VARIANTS, WORK, Ours
from pydtnn.kernels.cpu.compiled import Compiled
from pydtnn.utils.observer import Kind, Observer

WARM_UP = 5  # steps; the first one chooses algorithms
CALLS = 20_000  # of what is measured by itself


class Clock:
    """Time spent in wrapped functions, and calls of them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function."""

        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return result

        return call

    def read(self) -> tuple[float, int]:
        """Return seconds and calls, and begin anew."""
        result = self.seconds, self.calls
        self.seconds, self.calls = 0.0, 0
        return result


class Timed:
    """The methods of an extension object, wrapped."""

    def __init__(self, kernels: Any, clock: Clock) -> None:
        for name in dir(kernels):
            if not name.startswith("_"):
                setattr(self, name, clock.timed(getattr(kernels, name)))


def compiled(holder: Any) -> list[Compiled]:
    """The compiled families that an object holds."""
    return [family for family in vars(holder).values() if isinstance(family, Compiled)]


class Switch:
    """Puts wrappers around the kernels of a backend's families, and takes them off."""

    def __init__(self, backend: Any, clock: Clock) -> None:
        families = compiled(backend)
        families += [inner for family in families for inner in compiled(family)]
        self.pairs = [(family, family.kernels, Timed(family.kernels, clock)) for family in families]

    def wrap(self, on: bool) -> None:
        """Wrap the kernels, or restore them."""
        for family, kernels, timed in self.pairs:
            family.kernels = timed if on else kernels


class Layers(Observer):
    """Time outside of kernels by kind of layer and direction, in the steps with wrapped kernels."""

    def __init__(self, ours: Ours, clock: Clock) -> None:
        self.model, self.clock = ours.model, clock
        self.kinds = {node.name: type(node.layer).__name__ for node in ours.model.graph.nodes}
        self.outside: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._open: list[tuple[Kind, str, float, float]] = []

    def observe(self, on: bool) -> None:
        """Observe the following steps, or do not."""
        self.model.observer = self if on else None

    def clear(self) -> None:
        """Forget what has been counted."""
        self.outside.clear()
        self.calls.clear()

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self._open.append((kind, name, self.clock.seconds, time.perf_counter()))

    def end(self) -> None:
        kind, name, inside, start = self._open.pop()
        elapsed = time.perf_counter() - start
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            label = f"{self.kinds[name]}.{kind.name.lower()}"
            self.outside[label] += elapsed - (self.clock.seconds - inside)
            self.calls[label] += 1


def seconds_per_call(call: Callable[[], object]) -> float:
    """Least of five means over many calls, without the loop's own time."""

    def mean(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        return (time.perf_counter() - start) / CALLS

    return min(mean(call) for _ in range(5)) - min(mean(lambda: None) for _ in range(5))


def measure(report: Report, name: str, threads: int, variant: str, steps: int, each: bool) -> None:
    """Print the table of one model."""
    ours, clock = Ours(name, threads, variant), Clock()
    backend = ours.model.backend
    one = np.ones(1, "float32")
    add = backend.elementwise.kernels.add
    nothing = clock.timed(lambda: None)
    wrapper = seconds_per_call(nothing)
    conversion = seconds_per_call(lambda: add(one, one, one, 1))
    switch = Switch(backend, clock)
    for _ in range(WARM_UP):
        ours.step()
    layers = Layers(ours, clock) if each else None
    times: dict[bool, list[float]] = {True: [], False: []}
    outside, calls = [], 0
    for on in (False, True):
        switch.wrap(on)
        if layers:
            layers.observe(on)
        ours.trainer.steps.replays.forget()
        for _ in range(2):
            ours.step()
        if layers:
            layers.clear()
        for _ in range(steps):
            clock.read()
            start = time.perf_counter()
            ours.step()
            times[on].append(time.perf_counter() - start)
            if on:
                inside, calls = clock.read()
                outside.append(times[on][-1] - inside - calls * wrapper)
    step = statistics.median(times[False])
    python, converting = statistics.median(outside), calls * conversion
    report.line(
        f"{name:13}{1e3 * step:9.3f}{1e3 * statistics.median(times[True]):10.3f}{calls:8}"
        f"{1e6 * wrapper:9.2f}{1e6 * conversion:9.2f}{1e3 * python:9.3f}{1e3 * converting:9.3f}"
        f"{(python + converting) / step:9.1%}"
    )
    if layers:
        layer_table(report, layers, steps, python)


def layer_table(report: Report, layers: Layers, steps: int, python: float) -> None:
    """Print where the time outside of kernels goes, per step."""
    report.line(f"    {'outside of kernels, in':34}{'calls':>6}{'us each':>9}{'ms':>9}")
    for name, total in layers.outside.most_common():
        count = layers.calls[name] / steps
        seconds = total / steps
        report.line(f"    {name:34}{count:6.0f}{1e6 * seconds / count:9.2f}{1e3 * seconds:9.3f}")
    rest = python - sum(layers.outside.values()) / steps
    report.line(f"    {'loops, loss, update, trainer':49}{1e3 * rest:9.3f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44", "mlp"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, default="full")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", action="store_true", help="say which layers it is in")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    report = Report(args.output)
    report.line(
        f"{'model':13}{'step ms':>9}{'wrapped':>10}{'calls':>8}{'wrap us':>9}{'conv us':>9}"
        f"{'outside':>9}{'convert':>9}{'Python':>9}"
    )
    for name in args.models:
        measure(report, name, args.threads, args.variant, args.steps, args.layers)


if __name__ == "__main__":
    main()
