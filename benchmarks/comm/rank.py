"""One rank that trains on its part of a batch: ours, or PyTorch's. Started by `ranks.start`.

The batch stays in memory, so that a step is forward, backward, exchange and update, and nothing
else. Rank 0 prints what all ranks have measured.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.common.work import WORK, resident

STEPS = 10
"""Steps of an epoch: long enough to average, so short that many fit into a run."""

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Where launchers say which rank a process is."""


class Measured(NamedTuple):
    """What one rank has measured: seconds of epochs, of that exposed, and MB."""

    seconds: list[float]
    exposed: list[float]
    megabytes: float
    memory: float


def ours(name: str, ranks: int, threads: int, epochs: int, batch: int) -> None:
    """Be a rank of ours. What is exposed is told by the clock of the trainer's communicator."""
    from benchmarks.common.work import Ours
    from pydtnn.comm import create_communicator

    comm = create_communicator()
    if comm.size != ranks:
        raise SystemExit(f"rank: expected {ranks} ranks, found {comm.size}; look at the launcher")
    side = Ours(name, threads, comm=comm, samples=part(batch, comm.rank, ranks))
    traffic = side.trainer.comm.traffic
    seconds, exposed, sent = [], [], 0
    for _ in range(1 + epochs):
        comm.barrier()
        waited, sent = traffic.seconds, traffic.bytes
        seconds.append(timed(side.step))
        exposed.append(traffic.seconds - waited)
    own = Measured(seconds, exposed, (traffic.bytes - sent) / STEPS / 1e6, resident(peak=True))
    found = comm.gather_object(own)
    if comm.rank == 0:
        say(found, batch)


def torch(name: str, ranks: int, threads: int, epochs: int, batch: int) -> None:
    """Be a rank of PyTorch's: DistributedDataParallel over gloo.

    What is exposed is by how much steps that do not communicate, right after, are shorter.
    """
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.common.work import Theirs

    rank = next(int(os.environ[key]) for key in RANK_VARIABLES if key in os.environ)
    torch.set_num_threads(threads)
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    work = WORK[name]._replace(batch=part(batch, rank, ranks))
    side = Theirs(work)
    side.net = DistributedDataParallel(side.net)

    seconds, exposed = [], []
    for _ in range(1 + epochs):
        distributed.barrier()
        seconds.append(timed(side.step))
        distributed.barrier()
        with side.net.no_sync():
            exposed.append(max(0.0, seconds[-1] - timed(side.step)))
    gradients = sum(p.numel() * p.element_size() for p in side.net.parameters())
    sent = 2 * (ranks - 1) / ranks * gradients  # as ours: by the algorithm that sends least
    found = [Measured([], [], 0.0, 0.0)] * ranks
    own = Measured(seconds, exposed, sent / 1e6, resident(peak=True))
    distributed.all_gather_object(found, own)
    if rank == 0:
        say(found, batch)
    distributed.barrier()
    os._exit(0)  # PyTorch's threads sometimes abort a process that leaves in the usual way


def part(batch: int, rank: int, ranks: int) -> int:
    """Samples of one rank."""
    return batch * (rank + 1) // ranks - batch * rank // ranks


def timed(step: Callable[[], None]) -> float:
    """Seconds of an epoch."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - start


def say(found: list[Measured], batch: int) -> None:
    """Print a line of JSON: the fields of `ranks.Run`, without the first epoch."""
    seconds = list(zip(*(one.seconds[1:] for one in found), strict=True))
    exposed = zip(*(one.exposed[1:] for one in found), strict=True)
    run = {
        "rates": [STEPS * batch / max(one) for one in seconds],
        "exposed": [sum(e) / sum(s) for e, s in zip(exposed, seconds, strict=True)],
        "megabytes": max(one.megabytes for one in found),
        "memory": max(one.memory for one in found),
    }
    print(json.dumps(run), flush=True)


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("side", choices=("ours", "torch"))
    parser.add_argument("name", choices=WORK)
    for number in ("ranks", "threads", "epochs", "batch"):
        parser.add_argument(number, type=int)
    args = parser.parse_args()
    side = {"ours": ours, "torch": torch}[args.side]
    side(args.name, args.ranks, args.threads, args.epochs, args.batch)


if __name__ == "__main__":
    main()
