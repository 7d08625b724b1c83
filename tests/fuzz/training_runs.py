"""A random training run, and the random ways in which ranks may carry it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.callbacks import Callback, EarlyStopping, ReduceOnPlateau
from pydtnn.comm import Communicator
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.data import ArrayDataset, Augmentation, Cutout, HorizontalFlip, RandomCrop
from pydtnn.kernels import create_backend
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Nadam, Optimizer, RMSProp
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import ShardedOptimizer
from pydtnn.schedules import get_schedule
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.trainer import Trainer
from tests.fuzz.small_networks import random_net
from tests.small_training import Interrupt

SCHEDULED = (
    *("constant", "warmup", "step", "epochs", "polynomial", "cosine", "cosine_restarts"),
    "triangular",
)

RULES: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "nesterov": partial(SGD, momentum=0.8, nesterov=True),
    "rmsprop": partial(RMSProp, epsilon=1e-3),
    "adagrad": partial(Adagrad, initial=1e-3),
    "adam": partial(Adam, epsilon=1e-3),
    "adamw": partial(AdamW, epsilon=1e-3),
    "nadam": partial(Nadam, epsilon=1e-3),
    "lars": partial(LARS, trust=0.05),
    "lamb": partial(LAMB, epsilon=1e-3),
}
"""Rules by name; no epsilon is so small that a gradient of rounding errors alone moves a weight."""

Result = dict[str, np.ndarray]
"""What a run leaves, by name."""


@dataclass(frozen=True)
class Way:
    """How a run is carried out, which must not change its result.

    Attributes
    ----------
    ranks, threads, loader_threads, bucket_bytes : int
    hosts : tuple of int
        Of every rank.
    scheme : type
    overlap : bool
    allreduce : str
    stops : tuple of int
        Epochs of the calls of `fit`, growing.
    """

    ranks: int
    threads: int
    loader_threads: int
    bucket_bytes: int
    hosts: tuple[int, ...]
    scheme: type[GradientExchange]
    overlap: bool
    allreduce: str
    stops: tuple[int, ...]


class Run:
    """What is trained, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.samples = int(rng.integers(4, 40))
        self.batch = int(rng.integers(2, min(self.samples, 17) + 1))
        self.shards = int(rng.integers(1, 13))
        self.epochs = int(rng.integers(1, 4))
        all_steps = -(-self.samples // self.batch)
        self.steps = int(rng.integers(1, all_steps + 1)) if rng.random() < 0.3 else all_steps
        self.images = bool(rng.random() < 0.6)
        self.pixels = self.images and bool(rng.random() < 0.6)
        self.shape = (*rng.integers(3, 8, 2).tolist(), int(rng.integers(1, 4)))
        if not self.images:
            self.shape = (int(rng.integers(1, 9)),)
        self.classes = int(rng.integers(2, 6))
        self.validated = int(rng.integers(0, 30)) * bool(rng.random() < 0.8)
        self.augment = self._augmentations() if self.images else []
        self.sync = bool(rng.random() < 0.4)
        self.dtype = "float32" if rng.random() < 0.8 else "float64"
        self.backend = "cpu" if rng.random() < 0.8 else "numpy"
        self.fuse = bool(rng.random() < 0.8)
        self.rule = str(rng.choice([*RULES]))
        self.schedule = str(rng.choice(SCHEDULED))
        self.warmup = int(rng.integers(0, self.epochs * self.steps)) * bool(rng.random() < 0.3)
        self.decay = float(rng.choice([0.0, 0.01]))
        self.clip = 0.3 if rng.random() < 0.25 else None
        self.smoothing = float(rng.choice([0.0, 0.1]))
        self.metrics = ["accuracy", "top2_accuracy"][: rng.integers(0, 3)]
        self.plateau, self.early = (rng.random(2) < 0.2).tolist()
        self._data = self._draw_data(self.samples), self._draw_data(self.validated)

    def _augmentations(self) -> list[Augmentation]:
        kinds = [RandomCrop(int(self.rng.integers(1, 3))), HorizontalFlip(), Cutout(2)]
        return [kinds[i] for i in self.rng.permutation(3)[: self.rng.integers(0, 4)]]

    def _draw_data(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        x = self.rng.integers(0, 256, (n, *self.shape), np.uint8)
        if not self.pixels:
            x = self.rng.normal(size=(n, *self.shape))
        return x, self.rng.integers(self.classes, size=n)

    # -- how it is carried out --------------------------------------------------------------------

    def way(self, ranks: int | None = None) -> Way:
        """Draw a way to carry it out; by default on any number of ranks."""
        rng = self.rng
        most = min(self.shards, self.batch, 8)
        ranks = int(rng.integers(1, most + 1)) if ranks is None else ranks
        schemes = [AllReduce, ShardedOptimizer] if self.clip is None else [AllReduce]
        few = 1 << 20 if self.clip is not None else int(rng.choice([1, 300, 3000, 1 << 20]))
        inner = sorted(set(rng.integers(1, self.epochs + 1, rng.integers(0, 3)).tolist()))
        return Way(
            ranks=ranks,
            threads=2 if rng.random() < 0.1 else 1,
            loader_threads=int(rng.choice([0, 0, 1, 3])),
            bucket_bytes=few,
            hosts=tuple(np.sort(rng.integers(0, rng.integers(1, 4), ranks)).tolist()),
            scheme=schemes[rng.integers(len(schemes))],
            overlap=bool(rng.random() < 0.7),
            allreduce=str(rng.choice(["vendor", *SCHEDULES])),
            stops=(*(epochs for epochs in inner if epochs < self.epochs), self.epochs),
        )

    @property
    def serially(self) -> Way:
        """One rank, without interruption."""
        return Way(1, 1, 0, 1 << 20, (0,), AllReduce, True, "vendor", (self.epochs,))

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks have something to do."""
        return ranks <= min(self.shards, self.batch)

    def trainer(self, comm: Communicator, way: Way, *callbacks: Callback) -> Trainer:
        """Make a rank's trainer."""
        comm = create_allreduce(way.allreduce, comm)
        options: dict[str, Any] = {"sums": partial(ExactSums, shards=self.shards)}
        if issubclass(way.scheme, AllReduce):
            options["overlap"] = way.overlap
        model = self.model(way)
        model.statistics.running += comm.rank  # those of rank 0 are taken
        return Trainer(
            model,
            self.optimizer(),
            loss=CategoricalCrossEntropy(self.smoothing),
            metrics=self.metrics,
            exchange=way.scheme(comm, **options),
            callbacks=[*self.callbacks(), *callbacks],
            sync_batch_norm=self.sync,
        )

    def model(self, way: Way) -> Model:
        parts = 1 if self.sync else self.shards
        last = min(self.samples - (self.steps - 1) * self.batch, self.batch)
        return Model(
            random_net(self.seed, self.shape, self.classes, last // parts > 1),
            self.shape,
            backend=create_backend(self.backend, threads=way.threads, tuning="fixed"),
            dtype=self.dtype,
            seed=self.seed,
            bucket_bytes=way.bucket_bytes,
            fuse=self.fuse,
        )

    def optimizer(self) -> Optimizer:
        rule = RULES[self.rule]
        lr = 0.05 if self.rule in ("sgd", "momentum", "nesterov", "lars") else 0.01
        schedule = get_schedule(
            self.schedule, lr, self.epochs * self.steps, self.steps, warmup_steps=self.warmup
        )
        return rule(schedule, weight_decay=self.decay, clip_norm=self.clip)

    def callbacks(self) -> list[Callback]:
        plateau: list[Callback] = [ReduceOnPlateau("loss", 0.5, patience=1)]
        return plateau * self.plateau + [EarlyStopping("loss", patience=1)] * self.early

    # -- what is done -----------------------------------------------------------------------------

    def datasets(self) -> tuple[ArrayDataset, ArrayDataset | None]:
        (x, y), (vx, vy) = self._data
        train = ArrayDataset(x, y, classes=self.classes)
        return train, ArrayDataset(vx, vy, like=train) if len(vx) else None

    def fit(self, trainer: Trainer, way: Way) -> None:
        train, validation = self.datasets()
        for epochs in way.stops:
            trainer.fit(
                train,
                validation,
                epochs=epochs,
                global_batch_size=self.batch,
                augment=self.augment,
                steps_per_epoch=self.steps,
                seed=self.seed,
                loader_threads=way.loader_threads,
            )

    def __repr__(self) -> str:
        return f"Run({self.seed})"


def carry_out(run: Run, way: Way, comm: Communicator, folder: Path, at: int = 0) -> Result:
    """Begin or continue a run; return what this rank has at its end.

    Raises
    ------
    Interrupted
        After step `at`, if it is not 0.
    """
    trainer = run.trainer(comm, way, *([Interrupt(at, folder)] if at else []))
    load_checkpoint(folder, trainer)
    run.fit(trainer, way)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Interrupt)]
    return result(trainer)


def result(trainer: Trainer) -> Result:
    """All that two runs that are to be equal must have in common, by name."""
    return {
        **{f"model/{name}": np.array(v) for name, v in trainer.model.state().items()},
        **{f"optimizer/{name}": np.array(v) for name, v in trainer.optimizer.state().items()},
        **{
            f"epoch {i}/{name}": np.array(value)
            for i, logs in enumerate(trainer.history)
            for name, value in logs.items()
        },
        **{
            f"callback {i}/{name}": np.array(value)
            for i, callback in enumerate(trainer.callbacks)
            for name, value in callback.state().items()
        },
    }


def different(ours: Result, expected: Result) -> list[str]:
    """Name what does not have the same bytes."""
    return [
        name
        for name in dict.fromkeys([*expected, *ours])
        if name not in ours
        or name not in expected
        or ours[name].tobytes() != expected[name].tobytes()
    ]
