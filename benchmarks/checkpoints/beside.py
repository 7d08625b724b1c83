"""What checkpoints cost: the time of training beside them, and memory.

    python -m benchmarks.checkpoints.beside                                   # time, one rank
    mpirun -np 4 python -m benchmarks.checkpoints.beside --models resnet44 --threads 1
    mpirun -np 4 python -m benchmarks.checkpoints.beside --axis filter --models vgg16_bn --memory

Time: turns of steps alternate, without checkpoints, with one in the background and with one at once
before every `--every` steps. A turn ends when its last checkpoint is on the disk. `blocked` is the
time for which a checkpoint stops training, `share` the additional time of a turn, and `cpu` its
additional time of processors, which other work on the machine does not change: medians, and the
middle half of the turns. `--folder` decides which disk is measured.

Memory (`--memory`): the largest resident memory of any rank in steps, while a checkpoint is saved
at once, loaded, and saved in the background beside steps, and as multiples of that of steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks.common.report import Report
from benchmarks.common.work import WORK, resident
from benchmarks.parallel import Case, Side
from pydtnn import Mesh
from pydtnn.comm import Communicator, create_communicator
from pydtnn.training.checkpoint import find_checkpoints, load_checkpoint
from pydtnn.training.checkpoint.saving import Saver
from pydtnn.training.trainer import Trainer
from pydtnn.utils.machine import restart_peak

MODES = ("none", "background", "at once")


def settle(saver: Saver, trainer: Trainer) -> None:
    """Wait for the checkpoint that is being written."""
    if error := saver.settle(trainer.comm):
        raise SystemExit(error)


def turn(
    side: Side, saver: Saver, checkpoints: int, every: int, mode: str, blocked: list[float]
) -> tuple[float, float]:
    """Train beside checkpoints; return the time, and that of this rank's processors."""
    trainer = side.trainer
    trainer.comm.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(checkpoints):
        if mode != "none":
            start = time.perf_counter()
            settle(saver, trainer)
            saver.start(trainer, background=mode == "background")
            if mode == "at once":
                settle(saver, trainer)
            blocked.append(time.perf_counter() - start)
        for _ in range(every):
            side.steps(1)
            saver.poll(trainer.comm)
    settle(saver, trainer)
    trainer.comm.barrier()
    return time.perf_counter() - begin, time.process_time() - used


def measure_time(side: Side, folder: Path, given: argparse.Namespace) -> str:
    """Return the row of a network."""
    saver = Saver(folder, keep=1)
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    blocked: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(1 + given.turns):
        for mode in MODES:
            if number == 0:  # chooses algorithms, plans
                turn(side, saver, 1, 1, mode, [])
            else:
                own = turn(side, saver, given.checkpoints, given.every, mode, blocked[mode])
                times[mode].append(own)
    none = np.array(times["none"])
    row = f"{1e3 * np.median(none[:, 0]) / given.checkpoints / given.every:10.2f}"
    for mode in MODES[1:]:
        shares = 100 * (np.array(times[mode]) / none - 1)
        low, middle, high = np.percentile(shares[:, 0], [25, 50, 75])
        row += f"{1e3 * statistics.median(blocked[mode]):10.2f}"
        row += f"{middle:8.2f} ({low:6.2f} to {high:6.2f}) {np.median(shares[:, 1]):7.2f}"
    return row


def measure_memory(comm: Communicator, side: Side, folder: Path) -> str:
    """Return the row of a network."""
    trainer = side.trainer

    def peak(work: Callable[[], object]) -> float:
        comm.barrier()
        restart_peak()
        work()
        return max(comm.gather_object(resident(peak=True)))

    def save(background: bool) -> None:
        settle(saver, trainer)
        saver.start(trainer, background=background)
        if background:
            side.steps(2)
        settle(saver, trainer)

    saver = Saver(folder, keep=1)
    side.steps(2)
    step = peak(lambda: side.steps(2))
    at_once = peak(lambda: save(False))
    load = peak(lambda: load_checkpoint(folder, trainer))
    background = peak(lambda: save(True))
    row = f"{step:10.1f}"
    for own in (at_once, load, background):
        row += f"{own:10.1f} {own / step:5.3f}"
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet44", "vgg16_bn"], choices=[*WORK])
    parser.add_argument("--axis", default="data", help="axis of the mesh")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--checkpoints", type=int, default=3, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    comm = create_communicator()
    report = Report(given.output) if comm.rank == 0 else None
    place = tempfile.TemporaryDirectory(dir=given.folder) if comm.rank == 0 else nullcontext("")
    with place as own, tempfile.TemporaryDirectory() as cache:
        os.environ["PYDTNN_CACHE"] = cache
        folder = Path(comm.gather_object(own)[0])
        columns = (
            f"{'step MB':>10}{'at once':>10} times{'load':>10} times{'background':>11} times"
            if given.memory
            else f"{'step ms':>10}"
            + "".join(f"{m + ' ms':>14}  share %{'cpu %':>19}" for m in MODES[1:])
        )
        if report:
            report.line(f"{comm.size} ranks along {given.axis}, {given.threads} threads each")
            report.line(f"{'model':12}{'MB':>8}{columns}")
        for name in given.models:
            with Mesh(comm, **{given.axis: comm.size}) as mesh:
                side = Side(Case(name, given.axis), given.threads, mesh)
                where = folder / name
                if given.memory:
                    row = measure_memory(comm, side, where)
                else:
                    row = measure_time(side, where, given)
                if report:
                    (path,) = find_checkpoints(where)
                    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
                    report.line(f"{name:12}{size:8.1f}{row}")
                comm.barrier()


if __name__ == "__main__":
    main()
