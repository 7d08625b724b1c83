"""How much memory parameters, gradients and optimizer state need if ranks keep parts of them.

    python -m benchmarks.comm.sharded                  # 4 ranks that are threads
    mpirun -n 2 python -m benchmarks.comm.sharded

Trains a GPT with AdamW for a few steps. Resident pages of the flat arrays are counted after each
gather and before each sum of gradients, except in the first step, and divided by the bytes of one
rank with everything. In Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from typing import Any

import numpy as np

from pydtnn import Trainer
from pydtnn.callbacks import FunctionCallback
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.mpi import create_mpi
from pydtnn.data import ArrayDataset
from pydtnn.model import Model
from pydtnn.models import gpt
from pydtnn.optimizers import AdamW
from pydtnn.parallel.schemes import ShardedGradients, ShardedOptimizer, ShardedParameters

PAGE = os.sysconf("SC_PAGESIZE")
LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def resident(array: np.ndarray) -> int:
    """Return the bytes of an array that are in memory."""
    start = array.ctypes.data // PAGE * PAGE
    pages = np.empty(-(-(array.ctypes.data + array.nbytes - start) // PAGE), np.uint8)
    libc, length = ctypes.CDLL(None), ctypes.c_size_t(PAGE * len(pages))
    assert libc.mincore(ctypes.c_void_p(start), length, ctypes.c_void_p(pages.ctypes.data)) == 0
    return int((pages & 1).sum()) * PAGE


def watched(scheme: Any) -> Any:
    """Return the scheme with a method that records the most resident bytes."""

    class Watched(scheme):  # type: ignore[misc]
        trainer: Trainer
        most = 0

        def look(self) -> None:
            arrays = [a for b in self.trainer.model.buffers for a in (b.values, b.grads)]
            slots = sum(part.nbytes for *_, part in self.trainer.optimizer.stored())
            self.most = max(self.most, slots + sum(map(resident, arrays)))

        def before_layer(self, now: Any, ahead: Any) -> None:
            super().before_layer(now, ahead)
            self.look()

        def bucket_ready(self, bucket: Any) -> None:
            self.look()
            super().bucket_ready(bucket)

    return Watched


def train(
    comm: Communicator, scheme: Any, given: argparse.Namespace, look: bool
) -> tuple[Any, ...]:
    """Return the most resident bytes, the time of the fastest step in s, and the whole bytes."""
    shape = (given.positions,)
    net = gpt(given.tokens, shape, depth=given.depth, heads=8, width=given.width)
    model, rng = Model(net, shape), np.random.default_rng(0)
    size = (given.batch * comm.size * given.steps, given.positions)
    x, y = rng.integers(given.tokens, size=(2, *size))
    ends: list[float] = []
    exchange = (watched(scheme) if look else scheme)(comm)

    def on_step_end(trainer: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) == 1:
            exchange.most = 0

    each = FunctionCallback(on_step_end=on_step_end)
    options: dict[str, Any] = {"metrics": (), "progress": False, "check_equal": 0}
    trainer = Trainer(model, AdamW(1e-3), exchange=exchange, callbacks=[each], **options)
    exchange.trainer = trainer
    trainer.fit(ArrayDataset(x.astype("float32"), y), global_batch_size=given.batch * comm.size)
    whole = 4 * sum(buffer.values.nbytes for buffer in model.buffers)
    return exchange.most, min(np.diff(ends)), whole


def run(comm: Communicator, given: argparse.Namespace) -> None:
    for scheme in (ShardedOptimizer, ShardedGradients, ShardedParameters):
        most, _, whole = train(comm, scheme, given, look=True)
        _, seconds, _ = train(comm, scheme, given, look=False)
        share = max(comm.gather_object(most)) / whole
        if comm.rank == 0:
            print(
                f"{scheme.__name__:18} {share:5.3f} of {whole / 1e6:.0f} MB, {seconds:5.3f} s/step"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="threads, without mpirun")
    for name, number in (("tokens", 1024), ("depth", 9), ("width", 512), ("positions", 64)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--batch", type=int, default=1, help="samples per rank")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    if any(name in os.environ for name in LAUNCHED):
        run(create_mpi(), given)
    else:
        run_threads(given.ranks, lambda comm: run(comm, given))


if __name__ == "__main__":
    main()
