"""What all adapters share: the job, the batches, and the measurement of steps.

An adapter is started on every rank as ``python adapter.py JOB`` with the environment variables
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or by mpirun. It needs NumPy and its framework only.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

RANKS = [os.environ[n] for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if n in os.environ]
RANK = int(RANKS[0]) if RANKS else 0


class Job:
    """What a run is: the content of the file JOB, and the arrays beside it.

    Attributes: ranks, threads, batch (samples of a rank), steps, warm_up, rate, momentum, layers,
    and `weights`, a list of arrays, see `networks.py`.
    """

    def __init__(self) -> None:
        self.folder = Path(sys.argv[1]).parent
        self.__dict__.update(json.loads(Path(sys.argv[1]).read_text()))
        self.rank = RANK
        os.sched_setaffinity(0, self.cores[RANK])
        arrays = np.load(self.arrays)
        self.x, self.y = arrays["x"], arrays["y"]
        self.weights = [arrays[f"w{i}"] for i in range(len(arrays.files) - 2)]
        self.port = int(os.environ.get("MASTER_PORT", 0))

    def batch_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's samples of a step, NHWC, and their labels."""
        first = (step * self.ranks + self.rank) * self.batch
        at = np.arange(first, first + self.batch) % len(self.x)
        return self.x[at], self.y[at]

    def measure(self, step, bytes_sent=lambda: None, version="") -> None:
        """Time `step(x, y)`, which returns this rank's loss when the step is done."""
        losses, times = [], []
        for index in range(self.warm_up + self.steps):
            if index == self.warm_up:
                before, socket = bytes_sent(), _socket_bytes()
            x, y = self.batch_of(index)
            begin = time.perf_counter()
            loss = float(step(x, y))
            times.append(time.perf_counter() - begin)
            losses.append(loss)
            if index == 0:
                ready = time.time() - self.started
        after, sockets = bytes_sent(), _socket_bytes()
        found = {
            "version": version,
            "losses": losses,
            "times": times,
            "start_up": ready,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "bytes": None if before is None else (after - before) / self.steps,
            "socket_bytes": (sockets - socket) / self.steps,
        }
        (self.folder / f"result-{self.rank}.json").write_text(json.dumps(found))


def _socket_bytes() -> int:
    """Return the bytes that this host's loopback and network cards have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)
