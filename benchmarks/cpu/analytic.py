"""Analytic times of training steps beside measured ones, per network and per class of layers.

    python -m pydtnn calibrate --output here.yaml --threads 1
    python -m benchmarks.cpu.analytic --platform here.yaml
    python -m benchmarks.cpu.analytic --platform here.yaml --classes --models resnet20 vgg16_bn

Times of layers are those of the processor for one thread, which do not depend on how often other
processes interrupt it, otherwise wall times; the shortest of the steps. "peaks" is the roofline
with the platform's peaks only, "rates" with its achieved rates. Accuracy is 1 - abs(error) of the
time of a step. Both are for one rank.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import Report
from pydtnn.comm import Serial
from pydtnn.tools.perfmodel.calibration.sample import processor_clock
from pydtnn.tools.perfmodel.compute import AnalyticCosts, Label
from pydtnn.tools.perfmodel.compute.classes import classify
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank
from pydtnn.training.workload import Workload
from pydtnn.utils.observer import Kind, Observer

CASES = {
    "resnet20": ("resnet20", (32, 32, 3), 10, (16, 64)),
    "resnet44": ("resnet44", (32, 32, 3), 10, (16, 64)),
    "vgg16_bn": ("vgg16_bn", (32, 32, 3), 10, (16, 64)),
    "cnn": ("cnn", (28, 28, 1), 10, (16, 64)),
    "resnet18": ("resnet18", (224, 224, 3), 1000, (2, 8)),
}
"""Network, input, classes and batches."""

WARM_UP = 3
ACCESSES = 5
"""Numbers that SGD with momentum reads and writes for each parameter."""


class Passes(Observer):
    """Time of each pass of each layer in a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.open: list[tuple[str, str, float]] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self.open.append((kind.name.lower(), name, self.clock()))

    def end(self) -> None:
        kind, name, start = self.open.pop()
        self.times[kind, name].append(self.clock() - start)


def measure(
    workload: Workload, steps: int
) -> tuple[float, dict[tuple[str, str], float], WorkloadRank]:
    """Return the time of a step and those of the passes of its layers, in s."""
    clock = processor_clock(workload.threads)
    plain = WorkloadRank(workload, Serial())
    whole = []
    for _ in range(WARM_UP + steps):
        start = clock()
        plain.trainer.train_step(plain.batch)
        whole.append(clock() - start)
    passes = Passes(clock)
    rank = WorkloadRank(workload, Serial(), observers=[passes])
    with rank.trainer.setup.observed():
        for _ in range(WARM_UP + steps):
            rank.trainer.train_step(rank.batch)
    layers = {
        key: min(own[WARM_UP:])
        for key, own in passes.times.items()
        if key[0] in ("forward", "backward")
    }
    return statistics.median(sorted(whole[WARM_UP:])[: max(steps // 2, 1)]), layers, rank


def predict(
    costs: AnalyticCosts, rank: WorkloadRank, bandwidth: float, batch: int
) -> dict[Label, float]:
    """Return the times of the passes of all layers, of the update, and of Python."""
    graph = rank.trainer.model.graph
    found = {}
    for node in graph.nodes[len(graph.inputs) :]:
        for kind in ("forward", "backward"):
            if kind == "forward" or node.index in graph.trained:
                label = Label(kind, node.name)
                found[label] = costs.seconds(label, node.layer, batch)
    step = Label("phase", "step")
    numbers = sum(p.size for p in rank.trainer.model.parameters.values())
    found[step] = costs.seconds(step, None, batch)
    found[Label("phase", "update")] = 4 * ACCESSES * numbers / bandwidth
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platform", required=True, help="name or file, measured on this machine")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--classes", action="store_true", help="one line per class of layers, too")
    parser.add_argument("--output", type=Path, help="file for the table")
    args = parser.parse_args()
    platform = Platform.load(args.platform)
    report = Report(args.output)
    kinds = {
        "peaks": AnalyticCosts(platform, peaks_only=True),
        "rates": AnalyticCosts(platform),
    }
    update = {"peaks": platform.rank_bandwidth, "rates": platform.update_bandwidth}
    accuracies: dict[str, list[float]] = defaultdict(list)
    report.line(
        f"{'network':12}{'batch':>6}{'measured ms':>13}{'peaks ms':>10}{'rates ms':>10}"
        f"{'accuracy, peaks':>17}{'rates':>8}"
    )
    for name in args.models:
        net, shape, classes, batches = CASES[name]
        for batch in batches:
            workload = Workload(
                net, shape, classes=classes, batch=batch, threads=platform.compute.threads
            )
            seconds, layers, rank = measure(workload, args.steps)
            found = {
                kind: predict(costs, rank, update[kind], batch) for kind, costs in kinds.items()
            }
            line = f"{name:12}{batch:6}{1e3 * seconds:13.2f}"
            for own in found.values():
                line += f"{1e3 * sum(own.values()):10.2f}"
            for kind, width in (("peaks", 17), ("rates", 8)):
                accuracy = 1 - abs(sum(found[kind].values()) - seconds) / seconds
                accuracies[kind].append(accuracy)
                line += f"{accuracy:{width}.1%}"
            report.line(line)
            if args.classes:
                by_class(report, rank, layers, seconds, found)
    for kind, own in accuracies.items():
        report.line(f"{kind}: mean accuracy {statistics.mean(own):.1%}, worst {min(own):.1%}")


def by_class(
    report: Report,
    rank: WorkloadRank,
    layers: dict[tuple[str, str], float],
    step: float,
    found: dict[str, dict[Label, float]],
) -> None:
    """Print measured and predicted times of each class of layers."""
    names = {node.name: node.layer for node in rank.trainer.model.graph.nodes}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
    for (kind, name), seconds in layers.items():
        row = sums[classify(names[name]).entry(kind)]
        for i, value in enumerate((seconds, *(f[Label(kind, name)] for f in found.values()))):
            row[i] += value
    rest = [step, *(sum(f.values()) for f in found.values())]
    for i in range(3):
        rest[i] -= sum(row[i] for row in sums.values())
    sums["update, loss and Python"] = rest
    for entry, row in sorted(sums.items(), key=lambda item: -item[1][0]):
        report.line(f"  {entry:34}{1e3 * row[0]:10.3f}{1e3 * row[1]:10.3f}{1e3 * row[2]:10.3f}")


if __name__ == "__main__":
    main()
