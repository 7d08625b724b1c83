"""The cost of recording layers, phases and messages in a training step.

    python -m benchmarks.cpu.tracing                        # ResNet-44 and the MLP, 1 thread
    mpirun -np 2 python -m benchmarks.cpu.tracing --turns 9
    mpirun -np 2 python -m benchmarks.cpu.tracing --flight --models resnet20 mlp

Method. One trainer makes steps with a recorder and without observers by turns (off, on, on, off),
so that both have the same arrays, algorithms and state of the machine. A turn compares the median
of the steps of either kind; the table shows the median, the least and the greatest of the turns,
for the wall time and for the CPU time of this process, which other programs disturb less. Then the
time of one record by itself. The targets are 1 % for ResNet-44 and 5 % for the MLP; for the flight
record, which is always written and instead of that of --trace with --flight, 0.5 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import Report
from benchmarks.common.work import WORK, Ours
from pydtnn.comm import create_communicator
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.monitor.supervision import CurrentActivity
from pydtnn.tools.tracing.recorder import Recorder
from pydtnn.utils.observer import Kind

WARM_UP = 3  # steps; the first one chooses algorithms
RECORDS = 20_000  # of the time of one record


class Switch:
    """A trainer that is observed or not.

    Parameters
    ----------
    ours : Ours
    flight : bool
        Whether the observer is that of the flight record.
    """

    def __init__(self, ours: Ours, flight: bool) -> None:
        self.ours = ours
        self.recorder: Any = FlightRecorder() if flight else TraceRecorder()
        if not flight:
            self.recorder.watch(ours.model.backend.memory)
        ours.trainer.comm.traffic.usual = None
        self.plain = replace(ours.trainer.setup, observer=None)
        self.observed = replace(self.plain, observer=self.recorder)
        self.records = 0

    def step(self, *, on: bool) -> tuple[float, float]:
        """Make a step; return its wall time and CPU time, in s."""
        trainer = self.ours.trainer
        trainer.setup = self.observed if on else self.plain
        vars(trainer).pop("steps", None)
        with trainer.setup.observed():  # which `fit` enters once
            wall, cpu = time.perf_counter(), time.process_time()
            self.ours.step()
            return time.perf_counter() - wall, time.process_time() - cpu

    def turn(self, steps: int) -> list[float]:
        """Make steps; return what observers add to their median wall and CPU time, in %."""
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(2 * steps):
            on = number % 4 in (1, 2)
            times[on].append(self.step(on=on))
        on, off = (
            [statistics.median(values) for values in zip(*times[on], strict=True)]
            for on in (True, False)
        )
        return [100 * (observed / plain - 1) for observed, plain in zip(on, off, strict=True)]

    def count(self) -> int:
        """Return the number of records of a step."""
        before = self.recorder.written
        self.step(on=True)
        return self.recorder.written - before


class TraceRecorder(Recorder):
    """The recorder of --trace."""

    @property
    def written(self) -> int:
        """Number of records so far."""
        return len(self.records())


class FlightRecorder(CurrentActivity):
    """The recorder of the flight record, in memory of its own."""

    def __init__(self) -> None:
        slot = Slot(memoryview(bytearray(SLOT)))
        slot.clear(0, 0)
        super().__init__(slot)

    @property
    def written(self) -> int:
        """Number of records so far."""
        return self.slot.records()[1]


def per_record(flight: bool) -> float:
    """Return the shortest time of one record, in s."""
    times = []
    for _ in range(10):
        recorder = FlightRecorder() if flight else TraceRecorder()
        start = time.process_time()
        for _ in range(RECORDS):
            recorder.begin(Kind.FORWARD, "layer")
            recorder.end()
        times.append((time.process_time() - start) / RECORDS)
    return min(times)


def measure(
    report: Report, name: str, threads: int, turns: int, seconds: float, flight: bool
) -> None:
    """Print the line of one model."""
    comm = create_communicator()
    switch = Switch(Ours(name, threads, comm=comm), flight)
    for _ in range(WARM_UP):
        switch.step(on=True)
    one = statistics.median(switch.step(on=False)[0] for _ in range(WARM_UP))
    steps = max(2, round(seconds / max(comm.gather_object(one)) / 2))
    results = [switch.turn(steps) for _ in range(turns)]
    records = switch.count()
    if comm.rank == 0:
        wall, cpu = (sorted(values) for values in zip(*results, strict=True))
        report.line(
            f"{name:10}{comm.size:6}{1e3 * one:10.3f}{records:9}{2 * steps:7}"
            f"{statistics.median(wall):9.2f} {f'({wall[0]:.2f} to {wall[-1]:.2f})':18}"
            f"{statistics.median(cpu):9.2f} {f'({cpu[0]:.2f} to {cpu[-1]:.2f})':18}".rstrip()
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44", "mlp"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--flight", action="store_true", help="measure the flight record instead")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn, about")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    report = Report(args.output)
    if create_communicator().rank == 0:
        report.line(
            f"{'model':10}{'ranks':>6}{'step ms':>10}{'records':>9}{'steps':>7}"
            f"{'wall, %':>28}{'CPU, %':>28}"
        )
    for name in args.models:
        measure(report, name, args.threads, args.turns, args.seconds, args.flight)
    if create_communicator().rank == 0:
        report.line(f"one record: {1e6 * per_record(args.flight):.2f} us")


if __name__ == "__main__":
    main()
