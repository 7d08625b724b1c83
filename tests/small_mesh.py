"""Trainers of a small network on a mesh, in float64, and their comparison with serial training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn import Mesh
from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import BatchNorm, Conv2d, Dropout, Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.trainer import Trainer

SHAPE = (7, 7, 2)
"""An odd size, so that stripes are uneven."""

STEPS = 3
"""Steps per epoch; the last batch is smaller."""

Axes = dict[str, int]


def small_net(norm: bool) -> Sequential:
    return Sequential(
        *(Conv2d(5, 3, bias=False), *([BatchNorm()] if norm else []), ReLU()),
        *(Conv2d(4, 5, stride=2, padding=2), Dropout(0.2), Flatten()),
        *(Linear(5), ReLU(), Linear(3, name="head")),
    )


def small_data() -> tuple[ArrayDataset, ArrayDataset]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(29, *SHAPE)), rng.integers(0, 3, 29)
    return ArrayDataset(x[:21], y[:21]), ArrayDataset(x[21:], y[21:])


def ranks_of(axes: Axes | None) -> int:
    return int(np.prod(list((axes or {}).values()), dtype=int))


def mesh_trainer(
    comm: Communicator,
    axes: Axes | None,
    *callbacks: Callback,
    optimizer: Optimizer | None = None,
    scheme: Any = AllReduce,
    sums: Any = None,
    seed: int = 0,
    norm: bool = True,
) -> Trainer:
    """A trainer on a mesh; without axes, serial."""
    mesh = None if axes is None else Mesh(comm, **axes)
    model = Model(small_net(norm), SHAPE, backend="numpy", dtype="float64", seed=seed, mesh=mesh)
    options = {} if sums is None else {"sums": sums}
    return Trainer(
        model,
        optimizer or SGD(0.1, momentum=0.9, weight_decay=1e-3),
        exchange=scheme(Serial() if mesh is None else mesh.data, **options),
        callbacks=callbacks,
        sync_batch_norm=norm,
        micro_batches=2 if "pipeline" in (axes or {}) else None,
        progress=False,
    )


def mesh_fit(trainer: Trainer, epochs: int = 1) -> list[dict[str, float]]:
    train, validation = small_data()
    return trainer.fit(train, validation, epochs=epochs, global_batch_size=8, seed=3)


def on_ranks(axes: Axes | None, rank: Any) -> list[Any]:
    """Return what ``rank(comm)`` returns on each of the ranks that a mesh requires."""
    return run_threads(ranks_of(axes), rank)


def assert_equal_states(states: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Assert that whole arrays of all ranks are those of serial training, up to rounding."""
    for state in states:
        assert list(state) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                state[name], value, rtol=1e-12, atol=1e-12, err_msg=name, strict=True
            )
