"""Traces replayed on another network, and without a slow rank, beside runs that are so.

    PYDTNN_WAIT=sleep python -m benchmarks.comm.what_if --turns 3 --realtime \\
        --output benchmarks/results/what_if.txt

For root, as `benchmarks.comm.cluster`: two emulated hosts of one rank, at 1 Gbit/s and 100 Mbit/s.
Every turn measures the messages of both clusters, as `pydtnn.calibrate` does, and trains on both,
with and without a rank that computes half as long again. Layers compute for a fixed time, so that
runs can be compared on a machine whose speed changes.

Buffers of connections have the length of 1 ms. With longer ones, the consent to receive a message
waits behind those that are sent the other way, which is not modelled: with 128 KiB at 100 Mbit/s,
steps take up to 15 % longer than replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comm.cluster import REALTIME, end_as_after_errors
from benchmarks.comm.cluster_hosts import bits_per_second
from benchmarks.comm.cluster_launch import Cluster, why_not
from benchmarks.comm.cluster_table import output
from benchmarks.common.report import Report
from pydtnn.comm import create_communicator
from pydtnn.layers import Conv2d, Flatten, Layer, Linear, Net, ReLU, Sequential
from pydtnn.tools.perfmodel.calibration.messages import measure_messages
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.replay import Replay, median_step
from pydtnn.tools.perfmodel.virtual import Processor
from pydtnn.tools.tracing import load_timeline

RATES = ("1gbit", "100mbit")
SLOW = "PYDTNN_BENCHMARK_SLOW"
"""Environment variable: how many times as long rank 1 computes."""
WARM_UP = 2


class Busy(Layer):
    """The identity, which takes 2 ms forward and 4 ms backward."""

    def forward(self, x: Any, context: Any) -> Any:
        _spin(2e-3)
        return x, None

    def backward(self, dy: Any, saved: Any) -> Any:
        _spin(4e-3)
        return dy


def _spin(seconds: float) -> None:
    slow = os.environ.get("OMPI_COMM_WORLD_RANK") == "1"
    end = time.perf_counter() + seconds * (float(os.environ.get(SLOW, "1")) if slow else 1.0)
    while time.perf_counter() < end:
        pass


def net(classes: int, input_shape: tuple[int, ...]) -> Net:
    """Return a network with 1.1 MB of gradients that computes for about 50 ms."""
    blocks = [(Busy(), Conv2d(64, 3, padding=1), ReLU()) for _ in range(7)]
    layers = [layer for block in blocks for layer in block]
    return Sequential(Conv2d(64, 3, stride=4), *layers, Flatten(), Linear(classes))


def main() -> None:
    """Print the table, or measure messages on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--realtime", action="store_true", help="let no other program interfere")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _measure(options.measure)
        return
    if why_not():
        sys.exit(f"what_if: {why_not()}.")
    end_as_after_errors()
    before = REALTIME if options.realtime else ()
    report = Report(options.output)
    with tempfile.TemporaryDirectory() as folder:
        turns = [Path(folder, str(turn)) for turn in range(options.turns)]
        for turn in turns:
            turn.mkdir()
            for rate in RATES:
                _record(turn, rate, before)
        _print(report, turns)


def _measure(path: Path) -> None:
    base = Platform.load("cpu-1gbit")
    comm = create_communicator()
    messages, _ = measure_messages(comm, base.messages)
    if comm.rank == 0:
        replace(base, messages=messages).save(path)
    comm.barrier()


def _record(turn: Path, rate: str, before: Sequence[str]) -> None:
    """Train on a cluster, without and with a slow rank, and measure its messages."""
    length = str(max(1 << 14, round(bits_per_second(rate) / 8e3)))
    buffers = {f"OMPI_MCA_btl_tcp_{name}": length for name in ("sndbuf", "max_send_size")}
    os.environ.update(buffers)
    data = {"samples": 800, "classes": 10, "shape": [32, 32, 3]}
    with Cluster(2, 1, rate) as cluster:
        for name, factor in (("usual", "1"), ("slow", "1.5")):
            os.environ[SLOW] = factor
            command = [
                *("python", "-m", "pydtnn.train", "--model", f"{__file__}:net", "--threads", "1"),
                *("--dataset", "synthetic", "--dataset-options", json.dumps(data)),
                *("--batch-size", "16", "--epochs", "1", "--lr", "0.001"),
                *("--checkpoint-epochs", "0", "--output-dir", str(turn / f"run-{rate}-{name}")),
                *("--trace", str(turn / f"{rate}-{name}")),
            ]
            output(cluster, [*before, *command])
        own = ["python", "-m", "benchmarks.comm.what_if", "--measure", str(turn / f"{rate}.yaml")]
        output(cluster, [*before, *own])


def _print(report: Report, turns: Sequence[Path]) -> None:
    report.line("median step in ms of each turn; difference of each, and of the medians")
    for source, target in product(RATES, RATES):
        for name, without, real in (
            ("usual", (), "usual"),
            ("slow", (), "slow"),
            ("slow", (1,), "usual"),
        ):
            replayed, measured = [], []
            for turn in turns:
                platform = Platform.load(turn / f"{target}.yaml")
                trace = Replay(load_timeline(turn / f"{source}-{name}"))
                ends = trace.run(platform.network(2), Processor.of(platform), without=without)
                replayed.append(1e3 * median_step(ends[WARM_UP:]))
                stops = load_timeline(turn / f"{target}-{real}").steps.stop[WARM_UP:]
                measured.append(1e-6 * median_step(stops))
            words = f"{name}{', replaced' if without else ''}"
            errors = [a / b - 1 for a, b in zip(replayed, measured, strict=True)]
            whole = median(replayed) / median(measured) - 1
            report.line(
                f"{source:>7} as {target:7}  {words:14}  replayed {_numbers(replayed)}  "
                f"measured {_numbers(measured)}  {' '.join(f'{e:+6.1%}' for e in errors)}  "
                f"{whole:+6.1%}"
            )


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:6.1f}" for value in values)


if __name__ == "__main__":
    main()
