"""Real runs with a rank that sleeps: the analysis names the rank, and its phase or layer."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.schedules.auto import create_allreduce
from pydtnn.data import ArrayDataset
from pydtnn.layers import Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.tracing import load_timeline
from pydtnn.tracing.analysis import CriticalPaths, find_blocks, slow_ranks, waits
from pydtnn.tracing.recorder import Recorder
from pydtnn.tracing.writing import Trace
from pydtnn.training.trainer import Trainer
from pydtnn.utils.observer import Kind

STEP = 0.03
"""Time that every rank sleeps in each step, in s."""

SLOW = 1
"""The rank that needs 30 % more time in a layer, or more than a step for each batch."""


class Sleep(ReLU):
    """A layer that takes a fixed time."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def forward(self, *xs: Any, context: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(*xs, context=context)


class SlowData(ArrayDataset):
    """A data set from which reading a batch takes a fixed time."""

    seconds = 0.0

    def read(self, indices: np.ndarray) -> tuple[Any, Any]:
        time.sleep(self.seconds)
        return super().read(indices)


def train(comm: Communicator, folder: Path, where: str, allreduce: str) -> None:
    late = comm.rank == SLOW
    extra = 0.3 * STEP * (late and where == "layer")
    net = Sequential(Flatten(), Linear(4), Sleep(STEP + extra, name="act"), Linear(3))
    rng = np.random.default_rng(0)
    data = SlowData(rng.normal(size=(64, 5, 5, 1)), rng.integers(0, 3, 64))
    data.seconds = 2 * STEP * (late and where == "loader")  # while the others compute
    recorder = Recorder()
    trainer = Trainer(
        Model(net, (5, 5, 1), backend="numpy", seed=0),
        SGD(0.1),
        exchange=AllReduce(create_allreduce(allreduce, comm)),
        observers=[recorder],
        progress=False,
    )
    with Trace(folder, recorder, trainer.comm):
        trainer.fit(data, epochs=2, global_batch_size=8)


@pytest.mark.parametrize(
    ("where", "kind", "name"), [("loader", Kind.PHASE, "data"), ("layer", Kind.FORWARD, "act")]
)
@pytest.mark.parametrize(("ranks", "allreduce"), [(2, "vendor"), (3, "ring")])
def test_a_slow_rank_is_named_with_its_phase_or_layer(
    where: str, kind: Kind, name: str, ranks: int, allreduce: str, tmp_path: Path
) -> None:
    run_threads(ranks, lambda comm: train(comm, tmp_path, where, allreduce))
    timeline = load_timeline(tmp_path)
    assert len(timeline.steps) == 16
    first = slow_ranks(timeline)[0]
    assert (first.rank, first.kind, first.name) == (SLOW, kind, name)
    assert first.excess > 0.15 * STEP  # a busy machine adds to all ranks
    blocks = find_blocks(timeline)
    found = waits(timeline, blocks)
    assert found[:, SLOW].sum() > found[SLOW].sum()
    paths = [CriticalPaths(timeline, blocks).find(step) for step in range(16)]
    late = [(path.late.rank, path.late.name) for path in paths if path.late is not None]
    assert Counter(late).most_common(1)[0][0] == (SLOW, name)
