"""Where a training step spends its time, and how far each of its layers is from what is possible.

    python -m benchmarks.cpu.roofline                          # ResNet-44, batch 64, 1 thread
    python -m benchmarks.cpu.roofline --model vgg16_bn --variant no-winograd --threads 2
    python -m benchmarks.cpu.roofline --output roofline.txt --picture roofline.png

Flops and bytes are what the layers declare (`Layer.cost`): nominal flops, and each array once. The
floor is the longer of flops at the peak of multiply-adds and bytes at the rate of a copy, both
measured here. The time is what the layer's forward or backward took, Python included, as the
median of the steps. "of roof" is floor / time. It exceeds 1 where Winograd's algorithm does with
fewer flops, or data is still in cache; a star marks less than 0.85. Layers that do the same are
added up; --nodes lists them one by one. Where layers are fused, a convolution also computes what
its input defers, and takes the sums of the norm after it: the others then have little left to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.report import Report
from benchmarks.common.work import VARIANTS, WORK, Ours
from benchmarks.cpu.bandwidth import bandwidth
from benchmarks.cpu.peak import Peak
from pydtnn.kernels import ConvGeometry
from pydtnn.model.graph import Node
from pydtnn.utils.observer import Kind, Observer

WARM_UP = 3  # steps; the first one chooses algorithms
MIN_SHARE_OF_ROOF = 0.85


@dataclass
class Part:
    """Layers that do the same, in one direction: numbers per step, over all of them."""

    name: str
    direction: str
    count: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, flops: float, moved: float, seconds: float) -> None:
        """Add a layer."""
        self.count += 1
        self.flops += flops
        self.bytes += moved
        self.seconds += seconds

    def floor(self, peak: float, rate: float) -> float:
        """Least time on a machine of so many flop/s and B/s, in s."""
        return max(self.flops / peak, self.bytes / rate)


class Clock(Observer):
    """Times what a model's layers do, step by step."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Kind], float] = defaultdict(float)
        self.steps: list[dict[tuple[str, Kind], float]] = []
        self._open: list[tuple[Kind, str, float]] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self._open.append((kind, name, time.perf_counter()))

    def end(self) -> None:
        kind, name, start = self._open.pop()
        self._sums[name, kind] += time.perf_counter() - start

    def end_step(self) -> None:
        """Keep the sums of a step and begin the next."""
        self.steps.append(dict(self._sums))
        self._sums.clear()

    def median(self, node: Node, kind: Kind) -> float:
        """Median time of a node over the steps, in s; 0 if it had nothing to do."""
        return statistics.median(step.get((node.name, kind), 0.0) for step in self.steps)


def name_of(node: Node) -> str:
    """Say what a layer does; layers of equal names do the same."""
    geometry = getattr(node.layer, "geometry", None)
    kind = type(node.layer).__name__
    if isinstance(geometry, ConvGeometry):
        return f"{kind} {geometry}"
    shapes = " and ".join("x".join(map(str, shape)) for shape in node.layer.input_shapes)
    return f"{kind} {shapes}"


def measure(ours: Ours, steps: int, *, single: bool) -> tuple[list[Part], float, float]:
    """Time steps, and between them the peak of one core.

    Returns
    -------
    list of Part
        In the order of the graph.
    float
        Median time of a step, in s.
    float
        Median peak, in flop/s.
    """
    graph = ours.model.graph
    nodes = graph.nodes[len(graph.inputs) :]
    for _ in range(WARM_UP):
        ours.step()
    clock, meter = Clock(), Peak(ours.model.backend.isa)
    ours.model.observer = clock
    whole, peaks = [], []
    for _ in range(steps):
        start = time.perf_counter()
        ours.step()
        whole.append(time.perf_counter() - start)
        clock.end_step()
        peaks.append(max(meter.measure() for _ in range(3)))
    parts: dict[tuple[str, str], Part] = {}
    for node in nodes:
        cost = node.layer.cost(len(ours.batch.x))
        for kind, flops, moved in (
            (Kind.FORWARD, cost.flops_forward, cost.bytes_forward),
            (Kind.BACKWARD, cost.flops_backward, cost.bytes_backward),
        ):
            direction = kind.name.lower()
            name = node.name if single else name_of(node)
            part = parts.setdefault((name, direction), Part(name, direction))
            part.add(flops, moved, clock.median(node, kind))
    return list(parts.values()), statistics.median(whole), statistics.median(peaks)


def table(report: Report, parts: list[Part], step: float, peak: float, rate: float) -> None:
    """Print the parts, and what no layer accounts for."""
    width = max(len(part.name) for part in parts)
    report.line(
        f"{'layers':{width}} {'':9}{'count':>5}{'GFLOP':>9}{'MB':>9}{'flop/B':>8}"
        f"{'floor ms':>10}{'ms':>9}{'of roof':>9}{'of step':>9}"
    )
    for part in parts:
        floor = part.floor(peak, rate)
        reached = floor / part.seconds if part.seconds else 0.0
        report.line(
            f"{part.name:{width}} {part.direction:9}{part.count:5}{part.flops / 1e9:9.3f}"
            f"{part.bytes / 1e6:9.1f}{part.flops / part.bytes if part.bytes else 0:8.1f}"
            f"{1e3 * floor:10.3f}{1e3 * part.seconds:9.3f}{reached:9.2f}"
            f"{part.seconds / step:9.1%}" + " *" * (reached < MIN_SHARE_OF_ROOF)
        )
    layers, floor = sum(p.seconds for p in parts), sum(p.floor(peak, rate) for p in parts)
    rest = step - layers
    report.line(f"{'all layers':{width + 41}}{1e3 * floor:10.3f}{1e3 * layers:9.3f}")
    report.line(f"{'loss, update and loops':{width + 51}}{1e3 * rest:9.3f}{'':9}{rest / step:9.1%}")
    report.line(f"{'step':{width + 51}}{1e3 * step:9.3f}")


def picture(path: Path, title: str, parts: list[Part], peak: float, rate: float) -> None:
    """Draw the roof with the parts under it, and beside it the time of each above its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 7), width_ratios=(1, 1.1))
    figure.suptitle(title)
    colors = {"forward": "tab:blue", "backward": "tab:orange"}
    step = sum(part.seconds for part in parts)
    shown = [part for part in parts if part.seconds > 0.005 * step and part.bytes]

    intensities = [0.1, peak / rate, 1000]
    left.loglog(intensities, [min(peak, i * rate) / 1e9 for i in intensities], "k-")
    left.annotate(f"peak {peak / 1e9:.0f} GFLOP/s", (900, 1.1 * peak / 1e9), ha="right")
    left.annotate(f"copy {rate / 1e9:.0f} GB/s", (1, 0.7 * rate / 1e9))
    for direction, color in colors.items():
        chosen = [part for part in shown if part.direction == direction]
        left.scatter(
            [part.flops / part.bytes for part in chosen],
            [part.flops / part.seconds / 1e9 for part in chosen],
            [2000 * part.seconds / step + 15 for part in chosen],
            color=color, alpha=0.6, label=f"{direction} (area: share of the step)",
        )  # fmt: skip
    left.set(xlabel="nominal flop / B", ylabel="nominal GFLOP/s", xlim=(0.1, 1000))
    left.set_ylim(top=4 * peak / 1e9)
    left.grid(alpha=0.3, which="both")
    left.legend(loc="lower right")

    most = sorted(shown, key=lambda part: part.seconds)[-20:]
    places = range(len(most))
    right.barh(
        places,
        [1e3 * p.seconds for p in most],
        color=[colors[p.direction] for p in most],
        alpha=0.6,
    )
    right.barh(
        places, [1e3 * p.floor(peak, rate) for p in most], height=0.3, color="black", label="floor"
    )
    right.set_yticks(places, [f"{p.count} x {p.name}, {p.direction}" for p in most], fontsize=8)
    right.set(xlabel="ms per step")
    right.grid(alpha=0.3, axis="x")
    right.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", choices=WORK, default="resnet44")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, default="full")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--nodes", action="store_true", help="every layer by itself")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--picture", type=Path, help="PNG to draw; needs matplotlib")
    args = parser.parse_args()
    report = Report(args.output)
    ours = Ours(args.model, args.threads, args.variant)
    isa, batch = ours.model.backend.isa, WORK[args.model].batch
    parts, step, core = measure(ours, args.steps, single=args.nodes)
    peak, rate = core * args.threads, bandwidth(args.threads)
    title = (
        f"{args.model}, batch {batch}, threads {args.threads}, {isa}, {args.variant}: "
        f"peak {peak / 1e9:.0f} GFLOP/s, copy {rate / 1e9:.1f} GB/s"
    )
    report.line(title)
    table(report, parts, step, peak, rate)
    if args.picture:
        picture(args.picture, title, parts, peak, rate)


if __name__ == "__main__":
    main()
