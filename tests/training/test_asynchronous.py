"""Asynchronous pipelines equal gradients of the weights before, applied in NumPy and serially."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer, run_threads
from pydtnn.callbacks import FunctionCallback
from pydtnn.comm import Communicator, Serial
from pydtnn.comm.wrapper import Delayed
from pydtnn.data import Loader
from pydtnn.layers import Linear, Sequential, Tanh
from pydtnn.optimizers import SGD, AdamW, Muon
from pydtnn.parallel import AllReduce, Mesh
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import LocalSGD, ShardedOptimizer, ShardedParameters, StaleGradients
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from tests.each import each
from tests.test_optimizers import LR, adam, muon, sgd
from tests.training import test_pipeline as stages

FORMULAS: dict[str, Any] = {
    "sgd": (partial(SGD, momentum=0.9, weight_decay=0.1), partial(sgd, momentum=0.9)),
    "adamw": (partial(AdamW, weight_decay=0.1), partial(adam, decoupled=True)),
    "muon": (partial(Muon, weight_decay=0.1), muon),
}
PLAN: Any = {"global_batch_size": 8, "seed": 2}


def data() -> ArrayDataset:
    """The last of 8 steps has 4 samples."""
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.normal(size=(60, 6)), rng.integers(0, 5, 60))


def trainer_of(comm: Communicator, rule: Any = "adamw", axes: Any = None, **own: Any) -> Trainer:
    """On two stages or more, with messages that are late."""
    mesh = Mesh(Delayed(comm, 1), **(axes or {"pipeline": comm.size}))
    net = Sequential(Linear(7), Tanh(), Linear(9), Tanh(), Linear(4), Tanh(), Linear(5))
    model = Model(net, (6,), dtype="float64", mesh=mesh, pipeline_schedule="2bw")
    exchange = own.pop("scheme", AllReduce)(mesh.data)
    rule = FORMULAS[rule][0] if isinstance(rule, str) else rule
    own = {"micro_batches": 4, "progress": False} | own
    return Trainer(model, rule(LR), exchange=exchange, **own)


def simulated(rule: str, whole: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[float]]:
    """W(t + 1) = W(t) - update(gradient of batch t at W(t - 1)): the last weights, and losses."""
    now, losses = [whole[name] for name in sorted(whole)], []  # biases and weights in turn
    formulas = [FORMULAS[rule][1](w, 0.1 if w.ndim > 1 else 0.0) for w in now]
    for formula in formulas:
        next(formula)
    loader = Loader(data(), **PLAN, dtype="float64")
    for epoch in (0, 1):
        before = now  # with nothing in flight, as for the smaller batch
        for batch in loader.epoch(epoch):
            w, xs, grads = now if len(batch) < 8 else before, [batch.x], []
            for k in range(0, 8, 2):
                xs.append(np.tanh(xs[-1] @ w[k + 1].T + w[k]))
            p = np.exp(xs[-2] @ w[7].T + w[6])
            p, one = p / p.sum(axis=1, keepdims=True), np.eye(5)[batch.y]
            losses.append(-np.log((p * one).sum(axis=1)).mean())
            dz = (p - one) / len(p)
            for k, x in zip((6, 4, 2, 0), xs[-2::-1], strict=True):
                grads = [dz.sum(axis=0), dz.T @ x, *grads]
                dz = dz @ w[k + 1] * (1 - x**2)
            before, now = now, [f.send(g) for f, g in zip(formulas, grads, strict=True)]
    return now, losses


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rule", "axes", "options"),
    [
        ("sgd", {"pipeline": 2}, {}),
        ("muon", {"pipeline": 4}, {}),
        ("adamw", {"data": 2, "pipeline": 2}, {"micro_batches": 3}),
        ("adamw", {"pipeline": 4}, {"micro_batches": 7}),
        ("muon", {"data": 2, "pipeline": 2}, {"scheme": ShardedOptimizer}),
        ("sgd", {"pipeline": 2}, {"micro_batches": 1}),
        ("sgd", {"pipeline": 3}, {"micro_batches": 2}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_weights_before_which_they_change(rule, axes, options):
    def rank(comm: Communicator) -> Any:
        trainer = trainer_of(comm, rule, axes, **options)
        before = {name: value.copy() for name, value in trainer.model.state().items()}
        trainer.fit(data(), data(), epochs=2, **PLAN)
        return before, trainer.model.state(), trainer.losses

    for before, after, losses in run_threads(int(np.prod([*axes.values()])), rank):
        expected, means = simulated(rule, before)
        np.testing.assert_allclose(losses, means, rtol=1e-12)
        for name, array in zip(sorted(after), expected, strict=True):
            np.testing.assert_allclose(after[name], array, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("net", [stages.transformer, stages.resnet20])
def test_losses_are_those_of_one_process_that_applies_gradients_a_step_late(net):
    """Dropout, recomputation and statistics of batch norm included."""
    shape = stages.shape_of(net)

    def train(comm: Communicator, scheme: Any, recompute: Any = None, **options: Any) -> Any:
        own: Any = {"dtype": "float64", "pipeline_schedule": "2bw", "recompute": recompute}
        mesh = Mesh(comm, pipeline=comm.size) if comm.size > 1 else None
        model = Model(net(), shape, mesh=mesh, **own)
        exchange = scheme(mesh.data if mesh else comm)
        trainer = Trainer(model, SGD(LR, momentum=0.9), exchange=exchange, **options)
        trainer.fit(stages.dataset(shape=shape), **PLAN)
        state = model.state()
        return trainer.losses, {name: state[name] for name in state if name.endswith("mean")}

    late = partial(StaleGradients, delay=1)
    losses, means = train(Serial(), late, accumulation=4, progress=False)
    staged = partial(train, scheme=AllReduce, recompute=2, micro_batches=4, progress=False)
    for own, found in run_threads(2, staged):
        np.testing.assert_allclose(own, losses, rtol=1e-11)
        for name, value in found.items():
            np.testing.assert_allclose(value, means[name], rtol=1e-9, atol=1e-12)


def assert_same(trainer: Trainer, expected: dict[str, np.ndarray]) -> None:
    for name, value in trainer.model.state().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_run_that_is_resumed_within_an_epoch_gives_the_same_bytes(tmp_path):
    """A checkpoint ends the step in flight, and both runs continue with nothing in flight."""

    def rank(comm: Communicator) -> None:
        def save(trainer: Any) -> None:
            if trainer.step == 3:
                save_checkpoint(tmp_path, trainer)

        saved = FunctionCallback(on_step_end=save)
        through, resumed = trainer_of(comm, callbacks=[saved]), trainer_of(comm)
        through.fit(data(), **PLAN)
        load_checkpoint(tmp_path, resumed)
        assert (resumed.step, resumed.optimizer.iterations) == (3, 3)
        resumed.fit(data(), **PLAN)
        assert_same(resumed, through.model.state())
        assert resumed.history == through.history

    run_threads(2, rank)


@each("batch", [0, 3, 6])
def test_a_loss_that_is_not_finite_ends_training_with_the_parameters_before_it(batch):
    broken = data()
    found = next(Loader(broken, **PLAN).epoch(0, start=batch))
    broken.x[found.samples[3]] = np.inf

    def rank(comm: Communicator) -> None:
        trainer, expected = trainer_of(comm), trainer_of(comm)
        with pytest.raises(NotFiniteError, match=f"not finite at epoch 1, step {batch + 1}"):
            trainer.fit(broken, **PLAN)
        if batch:
            expected.fit(data(), steps_per_epoch=batch, **PLAN)
        assert_same(trainer, expected.model.state())

    run_threads(2, rank)


def test_a_training_that_a_callback_has_ended_with_messages_in_flight_is_not_continued():
    def rank(comm: Communicator) -> None:
        ended: list[int] = []

        def end(trainer: Any) -> None:
            ended.append(trainer.step)
            if len(ended) == 1:
                raise KeyError

        trainer = trainer_of(comm, callbacks=[FunctionCallback(on_step_end=end)])
        with pytest.raises(KeyError):
            trainer.fit(data(), **PLAN)
        with pytest.raises(ValueError, match="failed with micro-batches in flight; create a new"):
            trainer.fit(data(), **PLAN)

    run_threads(2, rank)


EXACT = partial(AllReduce, sums=partial(ExactSums, shards=4))


@each(
    ("message", "options"),
    [
        ("require plain sums .* got LocalSGD with Sums", {"scheme": LocalSGD}),
        ("got AllReduce with ExactSums", {"scheme": EXACT, "micro_batches": None}),
        ("whole weights, got ShardedParameters", {"scheme": ShardedParameters}),
        ("clip_norm must be None", {"rule": partial(SGD, clip_norm=1.0)}),
    ],
)
def test_what_an_asynchronous_pipeline_cannot_be_combined_with_is_refused(message, options):
    def refused(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            trainer_of(comm, **options)

    run_threads(2, refused)
