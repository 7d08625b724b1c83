"""What pays on slow links: allreduce schedules beside their predicted times, whole steps, defaults.

`cluster.py --table` prints this table. Its parts are programs that users run, too: `allreduce.py`,
`pydtnn.train`, and `default.py`, which has the default compete with all that could be set.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.comm.cluster_hosts import bits_per_second
from benchmarks.comm.cluster_launch import Cluster
from benchmarks.common.report import Report

NBYTES = 2_600_000  # all gradients of a ResNet-44
BATCH = 16  # per rank
STEPS = 16  # of an epoch; local SGD averages twice
EPOCHS = 2

MPIS_OWN = ("--allreduce", "vendor", "--scheme", ":bucket_bytes=1048576")
VARIANTS = {
    "uncompressed": (),
    "uncompressed, no overlap": ("--scheme", ":overlap=false"),
    "MPI's own, 1 MiB": MPIS_OWN,
    "the same, no overlap": (*MPIS_OWN, "--scheme", ":overlap=false"),
    "top-k 1 %, error feedback": ("--compress", "top_k:share=0.01"),
    "PowerSGD, rank 2": ("--compress", "power_sgd:rank=2"),
    "local SGD, period 8": ("--scheme", "local_sgd:period=8"),
}
"""Options of `pydtnn.train`; all but the first, which sets nothing, are compared with the first.

With 1 MiB, all but 4 % of the gradients of ResNet-20 are in one bucket, which is complete when
backward is all but over: what overlap gains shows with several.
"""


class Layout(NamedTuple):
    """A cluster to measure on."""

    rate: str
    hosts: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.rate:8} {self.hosts} x {self.ranks}"


class Steps(NamedTuple):
    """What a run says of itself: samples/s, share of exposed communication, MB per step."""

    rate: float
    exposed: float
    megabytes: float


def print_allreduces(report: Report, layouts: Sequence[Layout], before: Sequence[str]) -> None:
    """One row per layout and schedule; `before` goes before the command."""
    report.line(
        f"allreduce of {NBYTES / 1e6} MB, float32: median over the turns of the slowest rank"
    )
    titles = f"{'measured ms':>12}{'predicted ms':>13}{'/ measured':>11}{'ring / this':>12}"
    report.line(f"{'rate':8} hosts {'algorithm':20}{titles}")
    for layout in layouts:
        with Cluster(*layout[1:], layout.rate) as cluster:
            turns = max(5, round(bits_per_second(layout.rate) / 5e7))  # at most a minute
            command = ["python", "-m", "benchmarks.comm.allreduce", "--bytes", str(NBYTES)]
            command += ["--turns", str(turns)]
            text = output(cluster, [*before, *command])
        times = dict(read_allreduces(text))
        for name, (measured, predicted) in times.items():
            row = f"{layout} {name:20}{1e3 * measured:12.2f}"
            if predicted is not None:
                row += f"{1e3 * predicted:13.2f}{predicted / measured:11.2f}"
            report.line(f"{row:57}{times['ring'][0] / measured:12.2f}")


def read_allreduces(text: str) -> Iterator[tuple[str, tuple[float, float | None]]]:
    """The measured and predicted seconds of each algorithm in the output of `allreduce.py`."""
    pattern = re.compile(rf"^ *{NBYTES} (\S+) +(.*)$", re.M)
    for name, numbers in pattern.findall(text):
        measured, _, _, *predicted = map(float, numbers.split())
        yield name, (measured / 1e6, predicted[0] / 1e6 if predicted else None)


def print_steps(report: Report, layouts: Sequence[Layout], runs: int) -> None:
    """One row per layout and variant of training; these have another order in each run."""
    report.line(
        f"whole steps of ResNet-20, batch {BATCH} a rank: median (least to greatest) of {runs} runs"
    )
    titles = f"{'steps/s':>9} {'':18}{'ratio':>7}{'exposed':>9}{'MB/step':>9}"
    report.line(f"{'rate':8} hosts {'training':27}{titles}")
    for layout in layouts:
        found: dict[str, list[Steps]] = {name: [] for name in VARIANTS}
        with Cluster(*layout[1:], layout.rate) as cluster:
            for run in range(runs):
                names = list(VARIANTS)
                random.Random(run).shuffle(names)
                for name in names:
                    found[name].append(train(cluster, VARIANTS[name]))
        images = BATCH * cluster.size
        base = median(steps.rate for steps in found["uncompressed"])
        for name, steps in found.items():
            rates = sorted(one.rate / images for one in steps)
            spread = f"({rates[0]:.2f} to {rates[-1]:.2f})"
            middle = median(rates)
            report.line(
                f"{layout} {name:27}{middle:9.2f} {spread:18}{middle * images / base:7.2f}"
                f"{median(one.exposed for one in steps):9.0%}"
                f"{median(one.megabytes for one in steps):9.3f}"
            )


def train(cluster: Cluster, options: Sequence[str]) -> Steps:
    """Train for a few steps."""
    data = {"samples": STEPS * BATCH * cluster.size, "classes": 10, "shape": [32, 32, 3]}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("python", "-m", "pydtnn.train", "--model", "resnet20", "--threads", "1"),
            *("--dataset", f"synthetic:options={json.dumps(data)}"),
            *("--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--lr", "0.01"),
            *(
                "--checkpoint-every",
                ":epochs=0",
                "--output-dir",
                str(Path(folder, "run")),
                *options,
            ),
        ]
        return read_training(output(cluster, command))


def read_training(text: str) -> Steps:
    """Read what a training run prints in the end."""

    def last(pattern: str) -> float:
        return float(re.findall(rf"^{pattern}", text, re.M)[-1])

    compute, exposed = last(r"time in compute +([\d.]+) s"), last(r"time in comm\w+ +([\d.]+) s")
    return Steps(
        last(r"samples/s +([\d.]+)"),
        exposed / (compute + exposed),
        last(r"exchanged per rank +([\d.]+) MB") / (STEPS * EPOCHS),
    )


def print_defaults(report: Report, layouts: Sequence[Layout], seconds: float) -> None:
    """For each layout what `default.py` prints, and in the end the shares of all layouts."""
    shares = {}
    for layout in layouts:
        with Cluster(*layout[1:], layout.rate) as cluster:
            command = ["python", "-m", "benchmarks.comm.default", "--batch", str(BATCH)]
            command += ["--seconds", str(seconds)]
            text = output(cluster, command)
        report.line(f"{layout}: ResNet-20, batch {BATCH} a rank, choices measured alternately")
        for line in text.splitlines():
            report.line(line)
        shares[layout] = read_share(text)
    report.line("the speed of the default, as a share of that of the fastest choice")
    for layout, share in shares.items():
        report.line(f"{layout} {share:.3f}")


def read_share(text: str) -> float:
    """The share of the speed of the fastest that `default.py` says the default has."""
    return float(re.findall(r"^default, \d+ buckets: ([\d.]+) of", text, re.M)[-1])


def output(cluster: Cluster, command: Sequence[str]) -> str:
    """What a command prints on the cluster.

    Raises
    ------
    RuntimeError
        Where it fails.
    """
    done = cluster.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(f"cluster: `{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout.replace("\r", "")
