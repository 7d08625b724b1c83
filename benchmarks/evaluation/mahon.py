"""ResNet-44 on CIFAR-10 on 1 to 12 devices: what is predicted for 12 V100 beside what was measured.

    python -m benchmarks.evaluation.mahon

Mahon, Varrette, Plugaru, Pinel and Bouvry, "Performance analysis of distributed and scalable deep
learning", CCGrid 2020, report that 12 V100 had 10.11 times the throughput of one with
PyTorch's DistributedDataParallel. What is not known here is varied: the samples of a device, and
whether 12 devices have as many each (weak) or together (strong), how fast kernels are compared
with the roofline of the device, and whether sums overlap with backward. The cluster is the platform
`abci`, with four V100 a host; its constants are those of Kahira et al. (2021), and 20 us for each
pass of a layer. Not part of the prediction: loading, and devices that are slower at times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from pydtnn.tools.perfmodel import Platform, Workload
from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.projection import Projector

MEASURED, DEVICES = 10.11, 12
"""Times the throughput of one device, and on how many."""

PLATFORM = "abci"
SAMPLES = (32, 128, 512)
EFFICIENCIES = (1.0, 0.3, 0.1)
"""Of kernels: their speed as a share of the roofline's."""

SHOWN = ((32, 1.0), (32, 0.3), (128, 0.3), (128, 0.1), (512, 0.1))
"""Samples and efficiencies of the table in docs/evaluation.md, which a test compares."""

ALL = 2**30
"""B of a bucket that all gradients fit into: they are summed when backward is over."""


class Prediction(NamedTuple):
    """A step on one device and on all, in s; `samples` of one device."""

    scaling: str
    samples: int
    efficiency: float
    overlap: bool
    one: float
    all: float

    @property
    def work(self) -> int:
        """How many times the samples of one device all have."""
        return DEVICES if self.scaling == "weak" else 1

    @property
    def times(self) -> float:
        """How many times the throughput of one device that of all is."""
        return self.work * self.one / self.all

    @property
    def missing(self) -> float:
        """By how much a step of all would have to be longer for what was measured, in s."""
        return self.work * self.one / MEASURED - self.all


def predictions() -> Iterator[Prediction]:
    """Yield a prediction for each combination of what is not known."""
    platform = Platform.load(PLATFORM)
    work = Workload("resnet44", (32, 32, 3), classes=10)
    for efficiency in EFFICIENCIES:
        peak = {dtype: efficiency * rate for dtype, rate in platform.compute.peak.items()}
        bandwidth = efficiency * platform.compute.memory_bandwidth
        compute = replace(platform.compute, peak=peak, memory_bandwidth=bandwidth)
        slower = replace(platform, compute=compute)
        projector = Projector(work, slower, AnalyticCosts.of(work, slower))
        for samples, overlap, scaling in product(SAMPLES, (True, False), ("weak", "strong")):
            total = samples * DEVICES if scaling == "weak" else samples
            alone = replace(work, batch=samples, bucket_bytes=None if overlap else ALL)
            shared = replace(alone, batch=total, axes={"data": DEVICES})
            times = (projector.project(one).step.seconds for one in (alone, shared))
            yield Prediction(scaling, samples, efficiency, overlap, *times)


def table(found: Sequence[Prediction]) -> list[str]:
    """Return the lines of the table of weak scaling."""
    columns = ("weak scaling, float32", "1 device", f"{DEVICES}, overlapped", "times")
    columns = (*columns, f"{DEVICES}, not overlapped", "times", "measured")
    rows = [columns, ("---",) * len(columns)]
    own = {(one.samples, one.efficiency, one.overlap): one for one in found if one.work > 1}
    for samples, efficiency in SHOWN:
        pair = [own[samples, efficiency, overlap] for overlap in (True, False)]
        cells = [text for one in pair for text in (f"{1e3 * one.all:.2f} ms", f"{one.times:.2f}")]
        name = f"{samples} samples, kernels {100 * efficiency:.0f} %"
        rows.append((name, f"{1e3 * pair[0].one:.2f} ms", *cells, f"{MEASURED}"))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(columns) + "|", *lines[2:]]


def main() -> None:
    """Print the predictions."""
    print(
        f"ResNet-44, CIFAR-10, {DEVICES} V100: measured {MEASURED} times one (Mahon et al., 2020)"
    )
    print(
        f"{'scaling':8}{'samples':>8}{'kernels':>9}{'overlap':>9}{'1 device':>13}"
        f"{DEVICES:7} devices{'times':>8}{f'{MEASURED} needs':>13}"
    )
    found = [*predictions()]
    for one in found:
        overlap = "yes" if one.overlap else "no"
        print(
            f"{one.scaling:8}{one.samples:8}{one.efficiency:9.0%}{overlap:>9}"
            f"{1e3 * one.one:10.2f} ms{1e3 * one.all:12.2f} ms{one.times:8.2f}"
            f"{1e3 * one.missing:+10.2f} ms"
        )
    print("", *table(found), sep="\n")


if __name__ == "__main__":
    main()
