"""Random sequences of a trainer's public calls, against what the documentation promises of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.agree import on_rank_0
from pydtnn.data import ArrayDataset, Loader
from pydtnn.layers import BatchNorm, Dropout, Flatten, Linear, ReLU, Reshape, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import get_optimizer
from pydtnn.parallel.schemes import create_scheme
from pydtnn.saving.weights import load_weights, save_weights
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError
from tests.parallel.schemes.course import OF_ANY_RULE
from tests.random_cases import Case

CALLS = 8
"""Of a sequence."""

REFUSED = (ValueError, TypeError, AgreedError)


class Drawn:
    """What all ranks of a sequence have in common."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.ranks = int(rng.integers(1, 5))
        self.samples = int(rng.integers(2 * self.ranks, 30))
        self.seed = int(rng.integers(1 << 31))
        self.scheme = str(rng.choice(OF_ANY_RULE))
        self.rule = str(rng.choice(["sgd", "adam", "rmsprop", "lamb"]))
        self.batch = int(rng.integers(2 * self.ranks, self.samples + 1))
        self.threads = int(rng.integers(0, 2))
        self.sync = bool(rng.integers(2))

    def __str__(self) -> str:
        return str(vars(self))

    def data(self) -> ArrayDataset:
        rng = np.random.default_rng(self.seed)
        return ArrayDataset(rng.normal(size=(self.samples, 4)), np.arange(self.samples) % 3)

    def trainer(self, comm: Communicator) -> Trainer:
        norm = (Linear(10), Reshape((2, 5)), BatchNorm(), Flatten())  # two rows of each sample
        net = Sequential(*norm, ReLU(), Dropout(0.2), Linear(3))
        model = Model(net, (4,), backend="numpy", dtype="float64", bucket_bytes=100)
        rule = get_optimizer(self.rule, lr=0.01)
        exchange = create_scheme(self.scheme, comm)
        return Trainer(model, rule, exchange=exchange, sync_batch_norm=self.sync)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a call may change and another must leave as it is."""
    parts = {"model": trainer.model, "optimizer": trainer.optimizer, "trainer": trainer}
    if trainer.exchange.buckets:
        parts["exchange"] = trainer.exchange
    return {
        f"{part}/{name}": copy.deepcopy(value)
        for part, of in parts.items()
        for name, value in of.state().items()
    }


def assert_equal(ours: dict[str, Any], expected: dict[str, Any], told: str) -> None:
    assert ours.keys() == expected.keys(), told
    for name, value in expected.items():
        np.testing.assert_equal(ours[name], value, err_msg=f"{name} after {told}")


@dataclass
class Sequence:
    """A trainer on one rank, the calls so far, and what should hold of it."""

    drawn: Drawn
    comm: Communicator
    folder: Path
    case: Case
    calls: list[str] = field(default_factory=list)
    epochs: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    saved: tuple[int, list[dict[str, float]], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.trainer = self.drawn.trainer(self.comm)
        self.data = self.drawn.data()

    def run(self) -> None:
        rng = np.random.default_rng(self.drawn.seed)
        kinds: list[Callable[[np.random.Generator], None]] = [
            *(self.fit, self.fit, self.evaluate, self.save, self.load, self.weights, self.state),
            *(self.refused, self.step, self.freeze),
        ]
        for _ in range(CALLS):
            call = kinds[rng.integers(len(kinds))]
            self.calls.append(call.__name__)
            call(rng)
            self.check(np.testing.assert_equal, self.trainer.epoch, self.epochs)
            self.check(np.testing.assert_equal, self.trainer.history, self.history)
            self.same_on_all_ranks()

    def check(self, check: Callable[..., None], ours: Any, expected: Any) -> None:
        told = f"{self.calls} of {self.drawn}"
        if self.comm.rank == 0:
            self.case.comparisons += 1
        if check is assert_equal:
            check(ours, expected, told)
        else:
            check(ours, expected, err_msg=told)

    def same_on_all_ranks(self) -> None:
        """Parameters, running statistics and history, where the scheme says so."""
        if self.trainer.exchange.equal and self.trainer.exchange.buckets:
            own = {name: np.array(value) for name, value in self.trainer.model.state().items()}
            own["history"] = np.array(repr(self.trainer.history))
            for other in self.comm.gather_object(own):
                self.check(assert_equal, other, own)

    def options(self) -> dict[str, Any]:
        return {
            "global_batch_size": self.drawn.batch,
            "seed": 3,
            "loader_threads": self.drawn.threads,
        }

    def fit(self, rng: np.random.Generator) -> None:
        """Some epochs more, none, or fewer than there are."""
        epochs = max(self.epochs + int(rng.integers(-1, 3)), 0)
        validation = self.data if rng.random() < 0.5 else None
        history = self.trainer.fit(self.data, validation, epochs=epochs, **self.options())
        more = history[self.epochs :]
        self.check(np.testing.assert_equal, history[: self.epochs], self.history)
        self.check(np.testing.assert_equal, len(more), max(epochs - self.epochs, 0))
        for logs in more:
            names = {"loss", "accuracy", "lr"}
            names |= {"val_loss", "val_accuracy"} if validation is not None else set()
            self.check(np.testing.assert_equal, set(logs), names)
        self.epochs, self.history = max(epochs, self.epochs), copy.deepcopy(history)

    def freeze(self, rng: np.random.Generator) -> None:
        """What is frozen does not change in training; steps and checkpoints wait for the next."""
        trainer, model = self.trainer, self.trainer.model
        layers = ["linear0", "batchnorm2", "linear6", "linear0.w"]
        chosen = str(layers[rng.integers(len(layers))])
        before = model.frozen
        (model.thaw if rng.random() < 0.4 else model.freeze)(chosen)
        if {*before} != {*model.frozen}:
            with pytest.raises(ValueError, match="frozen or thawed after the last fit"):
                trainer.state()
        if not model.buckets:
            with pytest.raises(ValueError, match="got a model of which all are frozen"):
                self.fit(rng)
            model.thaw("*")
        kept = {name: model.parameters[name].master.copy() for name in model.frozen}
        self.fit(rng)
        if trainer.exchange.equal or not self.comm.rank:  # the others had parameters of their own
            values = {name: model.parameters[name].master for name in model.frozen}
            self.check(assert_equal, values, kept)

    def evaluate(self, rng: np.random.Generator) -> None:
        """It changes nothing, and the size of its batches changes nothing of it."""
        before = state_of(self.trainer)
        sizes = rng.integers(1, 40, 2).tolist()
        first, second = (self.trainer.evaluate(self.data, batch_size=size) for size in sizes)
        for name, value in first.items():
            # Sums of at most 30 float64 in another order.
            np.testing.assert_allclose(second[name], value, rtol=1e-12, err_msg=str(self.calls))
        for other in self.comm.gather_object(first):
            self.check(np.testing.assert_equal, other, first)
        self.check(assert_equal, state_of(self.trainer), before)

    def save(self, rng: np.random.Generator) -> None:
        """A checkpoint changes nothing."""
        if not self.trainer.exchange.buckets:
            return
        before = state_of(self.trainer)
        save_checkpoint(self.folder / "run", self.trainer, keep=1)
        self.check(assert_equal, state_of(self.trainer), before)
        self.saved = self.epochs, copy.deepcopy(self.history), before

    def load(self, rng: np.random.Generator) -> None:
        """Everything is as it was when it was saved, in this trainer or in another."""
        if rng.random() < 0.5:
            self.trainer = self.drawn.trainer(self.comm)
            self.epochs, self.history = 0, []
        path = load_checkpoint(self.folder / "run", self.trainer)
        self.check(np.testing.assert_equal, path is None, self.saved is None)
        if self.saved is not None:
            self.epochs, self.history, state = self.saved
            self.history = copy.deepcopy(self.history)
            self.check(assert_equal, state_of(self.trainer), state)

    def weights(self, rng: np.random.Generator) -> None:
        """What is saved and loaded again is the same."""
        path = self.folder / "weights.safetensors"
        with self.trainer.averaged():
            before = state_of(self.trainer)
            on_rank_0(self.comm, save_weights, self.trainer.model, path)
            load_weights(self.trainer.model, path)
            self.check(assert_equal, state_of(self.trainer), before)

    def state(self, rng: np.random.Generator) -> None:
        """Parts take what they returned."""
        before = state_of(self.trainer)
        if self.trainer.exchange.equal:  # else ranks would load different weights, which is refused
            self.trainer.model.load(self.trainer.model.state())
        self.trainer.optimizer.load(self.trainer.optimizer.state())
        self.check(assert_equal, state_of(self.trainer), before)

    def refused(self, rng: np.random.Generator) -> None:
        """What is refused changes nothing."""
        data, options, trainer = self.data, self.options(), self.trainer
        other = ArrayDataset(np.zeros((4, 7)), np.arange(4) % 3)
        none = ArrayDataset(np.zeros((0, 4)), np.zeros(0, int), like=data)
        mistakes: list[Callable[[], Any]] = [
            lambda: trainer.fit(data, epochs=-1, **options),
            lambda: trainer.fit(data, epochs=1.5, **options),
            lambda: trainer.fit(data, other, epochs=99, **options),
            lambda: trainer.fit(data, none, epochs=99, **options),
            lambda: trainer.fit(none, epochs=99, **options),
            lambda: trainer.fit(data.x, epochs=99, **options),
            lambda: trainer.fit(data, epochs=99, global_batch_size=31),
            lambda: trainer.fit(data, epochs=99, global_batch_size=0),
            lambda: trainer.fit(data, epochs=99, batch_size=31),
            lambda: trainer.fit(data, epochs=99, steps_per_epoch=99, **options),
            lambda: trainer.fit(data, epochs=99, augment="flip", **options),
            lambda: trainer.evaluate(data, batch_size=0),
            lambda: trainer.evaluate(none),
            lambda: trainer.evaluate(data.x),
            lambda: trainer.load(trainer.state() | {"metrics": ["x"]}),
            lambda: load_weights(trainer.model, self.folder / "none.safetensors"),
            lambda: self.drawn.trainer(self.comm).fit(data, epochs=1, global_batch_size=0),
        ]
        before, chosen = state_of(self.trainer), int(rng.integers(len(mistakes)))
        self.calls[-1] += f" {chosen}"
        with pytest.raises((*REFUSED, OSError)):
            mistakes[chosen]()
        self.check(assert_equal, state_of(self.trainer), before)

    def step(self, rng: np.random.Generator) -> None:
        """A step by hand changes the parameters on all ranks alike, and no epoch."""
        if not self.trainer.exchange.buckets:
            return
        before = self.trainer.optimizer.iterations
        place = {"rank": self.comm.rank, "size": self.comm.size}
        with Loader(
            self.data, global_batch_size=self.drawn.batch, dtype="float64", prefetch=0, **place
        ) as loader:
            totals = self.trainer.train_step(next(loader.epoch(0)))
        self.trainer.synchronise()  # as at an epoch's end
        count = totals.count  # of all ranks, or of this one if the scheme does not sum losses
        if not self.trainer.exchange.sums_losses:
            count = sum(self.comm.gather_object(count))
        self.check(np.testing.assert_equal, count, self.drawn.batch)
        self.check(np.testing.assert_equal, self.trainer.optimizer.iterations, before + 1)


@pytest.mark.fuzz("distributed")
def test_any_sequence_of_calls_leaves_a_trainer_as_documented(cases, tmp_path):
    for case in cases:
        drawn = Drawn(case.rng)
        folder = tmp_path / str(case.number)
        run_threads(
            drawn.ranks, lambda comm, d=drawn, f=folder, c=case: Sequence(d, comm, f, c).run()
        )
