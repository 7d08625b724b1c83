"""Real training with a rank that is slow, on virtual ranks: the analysis names rank and cause."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator
from pydtnn.comm.schedules.auto import create_allreduce
from pydtnn.data import ArrayDataset
from pydtnn.layers import Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.perfmodel.virtual import run_virtual
from pydtnn.tracing import load_timeline
from pydtnn.tracing.analysis import (
    CriticalPaths,
    efficiency,
    find_blocks,
    slow_ranks,
    usage,
    waits,
)
from pydtnn.tracing.recorder import Recorder
from pydtnn.tracing.writing import Trace
from pydtnn.training.trainer import Trainer
from pydtnn.utils import clock
from pydtnn.utils.observer import Kind, phase
from tests.each import each
from tests.perfmodel.virtual.costs import UniformCosts, cluster

SLOW = 1
"""The rank that takes longer in a layer, or in a callback."""


class Busy(ReLU):
    """A layer that takes a fixed time."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def forward(self, *xs: Any, context: Any) -> Any:
        clock.current().spend(self.seconds)
        return super().forward(*xs, context=context)


class Late(Callback):
    """A callback that takes a fixed time after each step on the slow rank."""

    def on_step_end(self, trainer: Any) -> None:
        clock.current().spend(0.06 * (trainer.comm.rank == SLOW))


def train(comm: Communicator, folder: Path, where: str, allreduce: str) -> None:
    extra = 0.06 * (comm.rank == SLOW and where == "layer")
    net = Sequential(Flatten(), Linear(4), Busy(0.03 + extra, name="act"), Linear(3))
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(64, 5, 5, 1)), rng.integers(0, 3, 64))
    recorder = Recorder(clock=clock.current())
    trainer = Trainer(
        Model(net, (5, 5, 1), backend="numpy", seed=0, bucket_bytes=16),
        SGD(0.1),
        exchange=AllReduce(create_allreduce(allreduce, comm)),
        callbacks=[Late()] if where == "callback" else [],
        observers=[recorder],
        progress=False,
    )
    with Trace(folder, recorder, trainer.comm):
        trainer.fit(data, epochs=2, global_batch_size=8, loader_threads=0)


def run(function: Any, ranks: int, *args: Any) -> None:
    network = cluster("abcd"[:ranks])
    run_virtual(function, *args, network=network, costs=UniformCosts())


@pytest.mark.parametrize(
    ("where", "kind", "name"),
    [("layer", Kind.FORWARD, "act"), ("callback", Kind.PHASE, "callback Late")],
)
@pytest.mark.parametrize(("ranks", "allreduce"), [(2, "vendor"), (3, "ring")])
def test_a_slow_rank_is_named_with_its_phase_or_layer(
    where: str, kind: Kind, name: str, ranks: int, allreduce: str, tmp_path: Path
) -> None:
    run(train, ranks, tmp_path, where, allreduce)
    timeline = load_timeline(tmp_path)
    assert len(timeline.steps) == 16
    first = slow_ranks(timeline)[0]
    assert (first.rank, first.kind, first.name) == (SLOW, kind, name)
    assert first.excess == pytest.approx(0.06, rel=0.01)
    blocks = find_blocks(timeline)
    found = waits(timeline, blocks)
    assert found[:, SLOW].sum() > found[SLOW].sum()
    paths = [CriticalPaths(timeline, blocks).find(step) for step in range(1, 16)]
    late = Counter((path.late.rank, path.late.name) for path in paths if path.late is not None)
    assert late.most_common(1)[0][0] == (SLOW, name)
    sent = timeline.messages.sent
    assert len(sent) > 0 or allreduce == "vendor"
    assert (blocks.find(sent["source"], sent["start"]) >= 0).all()
    useful, used = efficiency(timeline, blocks), usage(timeline, blocks)
    assert useful is not None
    np.testing.assert_allclose(useful.useful, [one.compute for one in used], rtol=1e-6)


@each("others", [1, 3])
def test_ranks_wait_for_those_of_their_group(others: int, tmp_path: Path) -> None:
    """Ranks 0, 2 and 1, 3 sum apart from each other, the former more often and with one late."""

    def sums(comm: Communicator) -> None:
        own = clock.current()
        recorder = Recorder(clock=own)
        comm.traffic.observer = recorder
        with Trace(tmp_path, recorder, comm), comm.split(comm.rank % 2) as group:
            for step in range(4):
                recorder.step(0, step)
                with phase(recorder, "step"):
                    own.spend(0.1 * (comm.rank == 3))
                    for _ in range(others if comm.rank % 2 == 0 else 1):
                        own.spend(0.05 * (comm.rank == 2))
                        group.allreduce(np.zeros(3))

    run(sums, 4)
    found = waits(load_timeline(tmp_path))
    assert found[1, 3] == pytest.approx(4 * 0.1, rel=0.01)
    assert found[0, 2] == pytest.approx(4 * 0.05 * others, rel=0.01)
    found[1, 3] = found[0, 2] = 0
    assert found.max() < 1e-3  # rank 3 is the last one in every sum of its group
