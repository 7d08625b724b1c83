"""Real runs with a rank that sleeps: the analysis names the rank, and its phase or layer."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.schedules.auto import create_allreduce
from pydtnn.data import ArrayDataset
from pydtnn.layers import Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
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
from pydtnn.utils.observer import Kind, phase
from tests.each import each

STEP = 0.03
"""Time that every rank sleeps in each step, in s."""

SLOW = 1
"""The rank that needs 30 % more in a layer, half a step in a callback, or steps for a batch."""


class Sleep(ReLU):
    """A layer that takes a fixed time."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def forward(self, *xs: Any, context: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(*xs, context=context)


class Late(Callback):
    """A callback that takes a fixed time after each step on the slow rank."""

    def on_step_end(self, trainer: Any) -> None:
        time.sleep(2 * STEP * (trainer.comm.rank == SLOW))


class SlowData(ArrayDataset):
    """A data set from which reading a batch takes a fixed time."""

    seconds = 0.0

    def read(self, indices: np.ndarray) -> tuple[Any, Any]:
        time.sleep(self.seconds)
        return super().read(indices)


def train(comm: Communicator, folder: Path, where: str, allreduce: str) -> None:
    late = comm.rank == SLOW
    extra = 2 * STEP * (late and where == "layer")
    net = Sequential(Flatten(), Linear(4), Sleep(STEP + extra, name="act"), Linear(3))
    rng = np.random.default_rng(0)
    data = SlowData(rng.normal(size=(64, 5, 5, 1)), rng.integers(0, 3, 64))
    data.seconds = 8 * STEP * (late and where == "loader")  # longer than a step on a busy machine
    recorder = Recorder()
    trainer = Trainer(
        Model(net, (5, 5, 1), backend="numpy", seed=0, bucket_bytes=16),
        SGD(0.1),
        exchange=AllReduce(create_allreduce(allreduce, comm)),
        callbacks=[Late()] if where == "callback" else [],
        observers=[recorder],
        progress=False,
    )
    with Trace(folder, recorder, trainer.comm):
        trainer.fit(data, epochs=2, global_batch_size=8)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("where", "kind", "name"),
    [
        ("loader", Kind.PHASE, "data"),
        ("layer", Kind.FORWARD, "act"),
        ("callback", Kind.PHASE, "callback Late"),
    ],
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
    sent, received = timeline.messages.sent, timeline.messages.received
    assert len(sent) > 0 or allreduce == "vendor"
    assert (blocks.find(sent["source"], sent["start"]) >= 0).all()
    assert (blocks.find(received["target"], received["stop"] - 1) >= 0).all()  # also in tests
    useful, used = efficiency(timeline, blocks), usage(timeline, blocks)
    assert useful is not None
    np.testing.assert_allclose(useful.useful, [one.compute for one in used], rtol=1e-6)


@each("others", [1, 3])
def test_ranks_wait_for_those_of_their_group(others: int, tmp_path: Path) -> None:
    """Ranks 0, 2 and 1, 3 sum apart from each other, the former more often and with one late."""
    slept = [0.0] * 4

    def late(rank: int, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        slept[rank] += time.perf_counter() - start

    def run(comm: Communicator) -> None:
        recorder = Recorder()
        comm.traffic.observer = recorder
        with Trace(tmp_path, recorder, comm), comm.split(comm.rank % 2) as group:
            for step in range(4):
                recorder.step(0, step)
                with phase(recorder, "step"):
                    late(comm.rank, 0.1 * (comm.rank == 3))
                    for _ in range(others if comm.rank % 2 == 0 else 1):
                        late(comm.rank, 0.05 * (comm.rank == 2))
                        group.allreduce(np.zeros(3))

    run_threads(4, run)
    found = waits(load_timeline(tmp_path))
    assert found[1, 3] == pytest.approx(slept[3], abs=0.08)  # the operating system is not exact
    assert found[0, 2] == pytest.approx(slept[2], abs=0.08)
    found[1, 3] = found[0, 2] = 0
    assert found.max() < 0.08  # rank 3 is the last one in every sum of its group
