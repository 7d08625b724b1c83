"""Training that recomputes values has the same bytes in every mode, on every number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Mesh, Model, Trainer, create_backend
from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import (
    Add,
    BatchNorm,
    Branches,
    Conv2d,
    Dropout,
    Flatten,
    Identity,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.utils.errors import AgreedError

SHAPE = (7, 5, 2)


def net() -> Sequential:
    conv = Conv2d(4, 3, padding="same")
    return Sequential(
        conv,
        BatchNorm(),
        ReLU(),
        Residual(Sequential(Conv2d(4, 3, padding="same", bias=False), BatchNorm())),
        ReLU(),
        Dropout(0.2),
        Branches(Conv2d(4, 1), Identity(), merge=Add()),
        Conv2d(4, 3, padding="same"),
        BatchNorm(momentum=0.3),
        MaxPool2d(2),
        Flatten(),
        Linear(5),
        BatchNorm(),
        Linear(3),
    )


def samples(number: int) -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(number, *SHAPE))
    return ArrayDataset(x, rng.integers(3, size=number), classes=3)


def train(comm: Communicator, recompute: Any, mode: dict[str, Any], **options: Any) -> list[bytes]:
    """Two epochs of three steps."""
    data = samples(24)
    backend = create_backend("cpu", threads=1, tuning="fixed")
    model = Model(net(), SHAPE, backend=backend, recompute=recompute, **options)
    mode = dict(mode)
    sums = {"sums": partial(ExactSums, shards=4)} if mode.pop("exact", False) else {}
    trainer = Trainer(
        model,
        SGD(0.05, momentum=0.9),
        exchange=AllReduce(comm, **sums),
        progress=False,
        **mode,
    )
    trainer.fit(data, data, epochs=2, global_batch_size=8, seed=5)
    assert recompute is None or model.cuts
    return [np.asarray(array).tobytes() for array in model.state().values()]


@pytest.mark.few(2)
@pytest.mark.threads(2)
@pytest.mark.parametrize(
    "mode",
    [
        {"accumulation": 2},
        {"sync_batch_norm": True, "accumulation": 2},
        {"exact": True},
        {"exact": True, "sync_batch_norm": True},
    ],
    ids=", ".join,
)
def test_training_has_the_same_bytes_with_recomputation(
    comm: Communicator, mode: dict[str, Any]
) -> None:
    for recompute, fuse in ((4, True), ("auto", False)):
        expected = train(comm, None, mode, fuse=fuse)
        assert train(comm, recompute, mode, fuse=fuse) == expected


@pytest.mark.threads(2)
def test_a_limit_that_one_rank_cannot_keep_is_refused_on_all_before_the_first_step(
    comm: Communicator,
) -> None:
    for limit, cut in ((10 if comm.rank else 1 << 40, True), (1 << 40, False)):
        model = Model(net(), SHAPE, recompute="auto", memory_limit=limit)
        trainer = Trainer(model, SGD(0.05), exchange=AllReduce(comm), progress=False)
        with (
            pytest.raises(AgreedError, match="rank 1: Model: memory_limit must be at least")
            if cut
            else nullcontext()
        ):
            trainer.fit(samples(16), epochs=1, batch_size=4)
        assert (trainer.losses == []) == cut
        assert cut or model.cuts == ()


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", ["filter", "spatial"])
def test_ranks_with_parts_of_a_network_repeat_the_same_exchanges(axis: str) -> None:
    def run(comm: Communicator) -> None:
        states = []
        for recompute in (None, 4, "auto"):
            mesh = Mesh(comm, **{axis: 2})
            model = Model(
                net(), SHAPE, dtype="float64", mesh=mesh, recompute=recompute, backend="numpy"
            )
            trainer = Trainer(model, SGD(0.05), exchange=AllReduce(mesh.data), progress=False)
            trainer.fit(samples(12), epochs=1, batch_size=4)
            states.append([array.tobytes() for array in model.state().values()])
        assert states[0] == states[1] == states[2]

    run_threads(2, run)


def test_a_stage_of_a_pipeline_recomputes_its_own_layers() -> None:
    def run(comm: Communicator) -> None:
        states = []
        for recompute in (None, 2, ["conv2d0", "conv2d7"]):
            mesh = Mesh(comm, pipeline=2)
            model = Model(net(), SHAPE, mesh=mesh, recompute=recompute, backend="numpy")
            options: Any = {"micro_batches": 2, "pipeline_schedule": "gpipe", "progress": False}
            trainer = Trainer(model, SGD(0.05), exchange=AllReduce(mesh.data), **options)
            trainer.fit(samples(8), epochs=1, batch_size=8)
            assert (recompute is None) == (not model.cuts)
            if recompute == 2:  # both micro-batches of GPipe are in flight: nothing is kept
                assert model.cuts[-1] == len(model.graph.nodes)
            states.append([array.tobytes() for array in model.state().values()])
        assert states[0] == states[1] == states[2]
        with pytest.raises(ValueError, match="Model.recompute: unknown layer 'conv9'"):
            Model(net(), SHAPE, mesh=Mesh(comm, pipeline=2), recompute="conv9")

    run_threads(2, run)
