"""Every scheme in random configurations against the same training written again, and resumed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.data import ArrayDataset
from pydtnn.data.order import permutation
from pydtnn.layers import BatchNorm, Flatten, Linear, Reshape, Sequential, Tanh
from pydtnn.model import Model
from pydtnn.optimizers import get_optimizer
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.schemes import GRAPHS, SCHEMES, create_scheme
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.trainer import Trainer
from tests.fuzz.reference_training import STEPS, Perceptron, Rule, train
from tests.fuzz.test_compression import draw_compressor


class Drawn:
    """A scheme, a rule, a network and data."""

    sums: Callable[[Communicator], Any] | None = None
    normed = False

    def __init__(self, rng: np.random.Generator) -> None:
        self.scheme = str(rng.choice([*STEPS]))
        self.ranks = int(rng.integers(1, 9))
        self.samples = int(rng.integers(self.ranks, 40))
        spare = self.samples - self.ranks
        self.batch = self.ranks + int(spare * rng.random() ** 3)  # mostly small: many steps
        self.accumulation = int(rng.integers(1, min(self.batch // self.ranks, 3) + 1))
        self.epochs = int(rng.integers(1, 4))
        self.seed = int(rng.integers(1000))
        sizes = [rng.integers(1, 7), *rng.integers(1, 9, rng.integers(0, 3)), rng.integers(2, 5)]
        self.net = Perceptron([int(size) for size in sizes])
        self.x = rng.normal(size=(self.samples + 20, sizes[0]))
        self.y = rng.integers(sizes[-1], size=len(self.x))
        self.validated = int(rng.integers(1, 21))
        self.options = self._options(rng)
        self.rule = str(rng.choice(["sgd", "rmsprop", "adam", "adamw"]))
        one_bit = self.scheme == "one_bit_adam"
        self.rule = "adamw" if one_bit else self.rule
        self.rule_options = self._rule_options(rng)
        if one_bit:
            self.rule_options["clip_norm"] = None
        self.bucket_bytes = int(rng.choice([1, 300, 1 << 20]))
        if one_bit or self.scheme == "streaming_diloco":  # in which buckets have steps of their own
            self.bucket_bytes = 1 << 20
        self.overlap = (
            {} if "overlap" not in _takes(self.scheme) else {"overlap": bool(rng.random() < 0.7)}
        )
        self.allreduce = str(rng.choice(["vendor", *SCHEDULES]))
        self.hosts = np.sort(rng.integers(0, rng.integers(1, 4), self.ranks)).tolist()

    def _options(self, rng: np.random.Generator) -> dict[str, Any]:
        all_options = {
            "period": int(rng.integers(1, 6)),
            "warm_up": int(rng.integers(1, 9)),
            "after": int(rng.integers(0, 6)),
            "beta": float(rng.uniform(0.1, 1.0)),
            "delay": int(rng.integers(0, 4)),
            "rate": float(rng.uniform(0.2, 1.0)),
            "momentum": float(rng.uniform(0.0, 0.6)),
            "mixing": float(rng.uniform(0.0, 0.9)),
            "graph": str(rng.choice([*GRAPHS])),
        }
        taken = _takes(self.scheme)
        if "period" in taken:
            all_options["delay"] %= all_options["period"]
        return {name: v for name, v in all_options.items() if name in taken}

    def _rule_options(self, rng: np.random.Generator) -> dict[str, Any]:
        lr = 0.2 if self.rule == "sgd" else 0.02
        options = {
            "lr": lambda step: lr / (1 + 0.1 * step),
            "weight_decay": float(rng.choice([0.0, 0.05])),
            "clip_norm": 0.2 if rng.random() < 0.3 else None,
        }
        if self.rule != "sgd":
            return options | {"epsilon": 1e-3}
        momentum = float(rng.choice([0.0, 0.8]))
        return options | {"momentum": momentum, "nesterov": momentum > 0 and rng.random() < 0.5}

    def model(self, rank: int) -> Model:
        parts: list[Any] = []
        for size in self.net.sizes[1:]:
            if self.normed:  # over two rows even of a single sample
                parts += [Linear(2 * size), Reshape((2, size)), BatchNorm(), Flatten()]
            parts += [Linear(size), Tanh()]
        options = {"backend": "numpy", "dtype": "float64", "bucket_bytes": self.bucket_bytes}
        model = Model(Sequential(*parts[:-1]), (self.net.sizes[0],), seed=rank, **options)
        model.statistics.running += rank  # those of rank 0 are taken
        return model

    def trainer(self, comm: Communicator) -> Trainer:
        """The ranks begin with different parameters."""
        comm = create_allreduce(self.allreduce, comm)
        return Trainer(
            self.model(comm.rank),
            get_optimizer(self.rule, **self.rule_options),
            exchange=self.exchange(comm),
            accumulation=self.accumulation,
        )

    def exchange(self, comm: Communicator) -> GradientExchange:
        sums = {} if self.sums is None else {"sums": self.sums}
        return create_scheme(self.scheme, comm, **self.options, **self.overlap, **sums)

    def train(self, comm: Communicator) -> tuple[np.ndarray, list[dict[str, float]]]:
        return self.fit(self.trainer(comm), self.epochs)

    def fit(self, trainer: Trainer, epochs: int) -> tuple[np.ndarray, list[dict[str, float]]]:
        part = slice(self.samples, self.samples + self.validated)
        data = ArrayDataset(
            self.x[: self.samples], self.y[: self.samples], classes=self.net.sizes[-1]
        )
        history = trainer.fit(
            data,
            ArrayDataset(self.x[part], self.y[part], like=data),
            epochs=epochs,
            global_batch_size=self.batch,
            seed=self.seed,
            loader_threads=0,
        )
        return flat(trainer.model), history

    def on_threads(self, rank: Callable[[Communicator], Any]) -> list[Any]:
        return run_threads(self.ranks, rank, hosts=self.hosts)

    def __str__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name not in "xy"})

    def reference(self) -> tuple[np.ndarray, list[dict[str, float]]]:
        """Train as the reference does."""
        rules = [Rule(self.rule, self.rule_options, self.net.decays()) for _ in range(self.ranks)]
        part = slice(self.samples, self.samples + self.validated)
        return train(
            self.net,
            flat(self.model(0)),
            rules,
            self.scheme,
            self.options,
            [self.epoch(epoch) for epoch in range(self.epochs)],
            (self.x[part], self.y[part]),
        )

    def epoch(self, epoch: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Of every step, the samples of all ranks."""
        order = permutation(self.seed, epoch, self.samples)
        steps = []
        for begin in range(0, self.samples, self.batch):
            shards = np.array_split(
                order[begin : begin + self.batch], self.ranks * self.accumulation
            )
            a = self.accumulation
            own = [np.concatenate(shards[a * r : a * (r + 1)]) for r in range(self.ranks)]
            steps.append([(self.x[rows], self.y[rows]) for rows in own])
        return steps


def _takes(scheme: str) -> list[str]:
    return [*inspect.signature(type(create_scheme(scheme, Serial()))).parameters]


def flat(model: Model) -> np.ndarray:
    """All parameters in the order of the layers: w, b, w, b, ..."""
    state = model.state()
    names = sorted(state, key=lambda name: (len(name), name.partition(".")[0], name.endswith("b")))
    return np.concatenate([np.array(state[name]).reshape(-1) for name in names])


@pytest.mark.fuzz("distributed")
def test_every_scheme_computes_what_a_loop_over_its_ranks_computes(cases):
    for case in cases:
        drawn = Drawn(case.rng)
        values, history = drawn.reference()
        found = drawn.on_threads(drawn.train)
        for own, (ours, logs) in zip(values, found, strict=True):
            # The order of sums differs: 1e-16 in float64, which some tens of steps make larger.
            check = np.testing.assert_allclose
            case.compare(check, ours, own, rtol=1e-9, atol=1e-11, err_msg=str(drawn))
            for mine, theirs in zip(logs, history, strict=True):
                for name, value in theirs.items():
                    case.compare(check, mine[name], value, rtol=1e-9, err_msg=f"{name} {drawn}")


class SaveAfter(Callback):
    """Save a checkpoint after so many steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_step_end(self, trainer: Trainer) -> None:
        self.steps -= 1
        if self.steps == 0:
            save_checkpoint(self.folder, trainer)


def draw_run(rng: np.random.Generator) -> Drawn:
    """Draw a run that the reference does not know: compressed, of other rules, or normalised."""
    run = Drawn(rng)
    if SCHEMES[run.scheme].sums_gradients and rng.random() < 0.7:
        power = create_sums("power_sgd", rank=int(rng.integers(1, 4)))
        run.sums = power if rng.random() < 0.2 else draw_compressor(rng)[1]
    if run.rule != "adamw" and rng.random() < 0.5:
        clip, name = run.rule_options["clip_norm"], str(rng.choice(["lars", "lamb"]))
        own = {"lr": 0.5, "trust": 0.05} if name == "lars" else {"lr": 0.02}
        run.rule, run.rule_options = name, {"weight_decay": 0.01, "clip_norm": clip, **own}
    run.normed = bool(rng.random() < 0.3) and run.batch > 3 * run.ranks
    return run


def bytes_of(trainer: Trainer) -> list[bytes]:
    """Parameters, running statistics, and what optimizer and exchange keep."""
    states = [trainer.optimizer.state(), trainer.exchange.state()]
    kept = [np.asarray(value).tobytes() for state in states for _, value in sorted(state.items())]
    values = [bucket.values.tobytes() for bucket in trainer.model.buckets]
    return [*values, trainer.model.statistics.running.tobytes(), *kept]


def all_true(results: list[bool], run: Drawn) -> None:
    assert all(results), run


@pytest.mark.fuzz("distributed")
def test_random_runs_end_in_the_same_bytes_in_several_fits_and_after_they_are_resumed(
    cases, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk is not the subject
    for case in cases:
        run = draw_run(case.rng)
        folder = tmp_path / str(case.number)
        stop = int(case.rng.integers(1, run.epochs * -(-run.samples // run.batch) + 1))
        # Where ranks have parameters of their own, each fit ends with the average.
        parts = [*range(1, run.epochs)] if SCHEMES[run.scheme].equal else []

        def rank(comm: Communicator, run=run, folder=folder, stop=stop, parts=parts) -> bool:
            whole, first, resumed = run.trainer(comm), run.trainer(comm), run.trainer(comm)
            for epochs in (*parts, run.epochs):
                run.fit(whole, epochs)
            first.callbacks.append(SaveAfter(folder, stop))
            run.fit(first, run.epochs)
            assert load_checkpoint(folder, resumed) is not None
            run.fit(resumed, run.epochs)
            # A checkpoint makes running statistics equal on all ranks, which changes their course.
            same = run.normed or bytes_of(whole) == bytes_of(first)
            whole.exchange.free()
            return same and bytes_of(first) == bytes_of(resumed)

        case.compare(all_true, run.on_threads(rank), run)


def test_the_reference_knows_every_scheme():
    assert STEPS.keys() == SCHEMES.keys()
