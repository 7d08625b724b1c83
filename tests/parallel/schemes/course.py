"""A short training run with uneven batches, on which the schemes are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset, Batch, Loader
from pydtnn.kernels import Backend
from pydtnn.layers import LayerNorm, Linear, Net, Sequential, Sigmoid, StepContext
from pydtnn.model import Model
from pydtnn.optimizers import LAMB, LARS, SGD, Adam, Muon, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.training.trainer import Trainer

FEATURES, SAMPLES, BATCH = 5, 37, 9
"""Five steps per epoch, the last with a single sample: all ranks but one have nothing to do."""

Weights = dict[str, np.ndarray]

OF_ANY_RULE = [name for name in SCHEMES if name != "one_bit_adam"]
"""Schemes for all update rules."""

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OF_ANY_RULE),  # whatever is registered
    ("allreduce", {"overlap": False}),
    ("local_sgd", {"period": 3}),
    ("post_local_sgd", {"after": 4, "period": 3}),
    ("diloco", {"period": 3}),
    ("streaming_diloco", {"period": 3, "delay": 2}),
    ("slow_momentum", {"period": 3}),
    ("gossip", {"graph": "exponential"}),
    ("gossip", {"graph": "one_peer"}),
    ("gossip", {"graph": "complete"}),
    ("stale", {"delay": 0}),
    ("stale", {"delay": 3}),
]

RULES: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.2, weight_decay=0.02),
    "momentum": lambda: SGD(0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda: Adam(0.02, weight_decay=0.01),
    "lars": lambda: LARS(0.5, trust=0.05, weight_decay=0.01),
    "lamb": lambda: LAMB(0.02, weight_decay=0.01),
    "muon": lambda: Muon(0.02),
    "clipped": lambda: Adam(0.02, clip_norm=0.1),
    "clipped_lars": lambda: LARS(0.5, trust=0.05, weight_decay=0.01, clip_norm=0.1),
}


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, FEATURES))
    return ArrayDataset(x, (x @ rng.normal(size=(FEATURES, 3))).argmax(axis=1))


def small_net() -> Net:
    """Some buckets whose parameters decay in part, of an odd size."""
    return Sequential(Linear(7), LayerNorm(), Sigmoid(), Linear(6), Sigmoid(), Linear(3))


def trainer_of(
    exchange: GradientExchange,
    optimizer: Optimizer,
    *,
    net: Net | None = None,
    bucket_bytes: int = 300,
    backend: Backend | str = "numpy",
    **options: Any,
) -> Trainer:
    model = Model(
        net or small_net(),
        (FEATURES,),
        backend=backend,
        dtype="float64",
        bucket_bytes=bucket_bytes,
        seed=exchange.comm.rank,  # ranks differ unless the scheme makes them equal
    )
    return Trainer(model, optimizer, exchange=exchange, **options)


def fit(trainer: Trainer, epochs: int = 3) -> Weights:
    trainer.fit(data(), data(), epochs=epochs, global_batch_size=BATCH, seed=5, loader_threads=0)
    return weights(trainer)


def weights(trainer: Trainer) -> Weights:
    return {name: np.array(value) for name, value in trainer.model.state().items()}


def train(
    exchange: GradientExchange, optimizer: Optimizer, epochs: int = 3, **options: Any
) -> Weights:
    """Train for some epochs; return the weights that all ranks have in the end."""
    return fit(trainer_of(exchange, optimizer, **options), epochs)


def train_serially(optimizer: Optimizer, epochs: int = 3) -> Weights:
    return train(AllReduce(Serial()), optimizer, epochs)


def gradient(trainer: Trainer, values: np.ndarray, batch: Batch, scale: float) -> np.ndarray:
    """The gradient of a batch's summed loss times `scale`, at these parameters."""
    trainer.model.buffers[0].values[:] = values
    context = StepContext(training=True, samples=batch.samples)
    y, residuals = trainer.model.forward(batch.x, context)
    _, dy = trainer.objective.losses[0](trainer.model.backend, y, batch.y, scale)
    trainer.model.backward(dy, residuals)
    return trainer.model.buffers[0].grads.copy()


def simulate(size: int, epochs: int, step: Callable[..., np.ndarray | None]) -> Weights:
    """Train as the ranks of a paper's algorithm would, in one process.

    `step(number, w, grads, samples)` changes `w`, the parameters of all ranks, shape (P,
    parameters); `grads(scale)` are their gradients there, of each rank's mean loss or scaled by
    what is given, and `samples` how many each rank has. What it returns last, or otherwise the mean
    of all ranks, is returned.
    """
    trainer = trainer_of(AllReduce(Serial()), SGD(0.0))
    w = np.tile(trainer.model.buffers[0].values, (size, 1))
    options = {"size": size, "seed": 5, "dtype": "float64", "prefetch": 0}
    loaders = [Loader(data(), global_batch_size=BATCH, rank=r, **options) for r in range(size)]
    number, result = 0, None
    for epoch in range(epochs):
        for batches in zip(*(loader.epoch(epoch) for loader in loaders), strict=True):
            samples = np.array([len(batch) for batch in batches])

            def grads(scale: float | None = None, batches=batches, w=w) -> np.ndarray:
                scales = [scale or 1 / max(len(batch), 1) for batch in batches]
                return np.array(list(map(gradient, [trainer] * size, w, batches, scales)))

            result = step(number, w, grads, samples)
            number += 1
    trainer.model.buffers[0].values[:] = w.mean(axis=0) if result is None else result
    return weights(trainer)


def assert_close(ours: Weights, expected: Weights) -> None:
    """Sums over ranks have another order than sums over samples: equal within rounding."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def checksum(comm: Communicator, trainer: Trainer) -> list[bytes]:
    """The parameters of every rank, on all ranks."""
    mine = b"".join(bucket.values.tobytes() for bucket in trainer.model.buckets)
    return comm.gather_object(mine)


def all_values(comm: Communicator, trainer: Trainer) -> np.ndarray:
    """The parameters of every rank, shape (P, parameters), on all ranks."""
    return np.array(comm.gather_object(trainer.model.buffers[0].values))
