"""Frozen parameters are constants: no gradient, no message, no update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Flatten,
    Linear,
    ReLU,
    Residual,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Adam
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.schemes import StaleGradients
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.gpu import to_host

SHAPE = (6, 6, 3)


def conv(name: str, filters: int = 4) -> Sequential:
    return Sequential(
        Conv2d(filters, 3, padding=1, bias=False, name="conv"), BatchNorm(name="bn"), name=name
    )


def network(*, norm: bool = True) -> Sequential:
    """Names: stem, body.0.body.a and b, head."""
    if not norm:
        return Sequential(
            Flatten(), Linear(8, name="stem"), ReLU(), Linear(6, name="body"), ReLU(),
            Linear(3, name="head"),
        )  # fmt: skip
    block = Residual(Sequential(conv("a"), ReLU(), conv("b"), name="body"), name="0")
    return Sequential(
        conv("stem"), ReLU(), Sequential(block, ReLU(), name="body"), Flatten(),
        Linear(3, name="head"),
    )  # fmt: skip


def data(n: int = 24) -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.normal(size=(n, *SHAPE)), rng.integers(0, 3, n))


def values(model: Model) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model.state().items()}


def train(model: Model, *, comm: Communicator | None = None, **options: Any) -> Trainer:
    optimizer = SGD(0.1, momentum=0.9, weight_decay=1e-2, **options)
    trainer = Trainer(model, optimizer, exchange=AllReduce(comm or Serial()))
    trainer.fit(data(), epochs=2, global_batch_size=8)
    return trainer


@each("fuse", [True, False])
@each("dtype", ["float32", "bfloat16"])
def test_frozen_values_and_statistics_do_not_change(fuse, dtype):
    model = Model(network(), SHAPE, dtype=dtype, fuse=fuse)
    model.freeze("stem", "body.0.body.a")
    before = values(model)
    train(model)
    changed = {name for name, data in values(model).items() if data != before[name]}
    assert changed == {name for name in before if name.startswith(("body.0.body.b", "head"))}
    model.thaw("body.0.body.a")
    model.freeze("body.0.body.a.bn.gamma")  # statistics change with the other parameter
    train(model)
    mean = "body.0.body.a.bn.running_mean"
    assert values(model)[mean] != before[mean]


def test_freezing_equals_a_learning_rate_of_0(backend):
    """Without batch norm, the only difference is the work that is saved."""
    frozen, slow = (Model(network(norm=False), SHAPE, backend=backend) for _ in range(2))
    frozen.freeze("stem", "head.b")
    train(frozen)
    none = {"lr_factor": 0, "weight_decay": 0}
    train(slow, groups={"stem": none, "head.b": none})
    assert values(frozen) == values(slow)


@pytest.mark.threads(2)
def test_only_trainable_parameters_are_sent(comm):
    model = Model(network(norm=False), SHAPE)
    trainer = train(model, comm=comm)
    sent, gradients = [], []
    for patterns in ((), ("stem", "body")):
        if patterns:
            model.freeze(*patterns)
        trainer.fit(data(), epochs=trainer.epoch + 1, global_batch_size=8)
        before = trainer.comm.traffic.bytes
        trainer.fit(data(), epochs=trainer.epoch + 1, global_batch_size=8)
        sent.append(trainer.comm.traffic.bytes - before)
        gradients.append(sum(b.grads.nbytes for b in model.buckets))
    assert gradients[1] < gradients[0] / 20
    assert sent[0] - sent[1] > 3 * 0.8 * (gradients[0] - gradients[1])  # of three steps


@each("fuse", [True, False])
def test_gradients_through_frozen_layers_are_the_same(backend, rng, fuse):
    """Norms that use running statistics pass a gradient as in evaluation."""
    x, dy = rng.normal(size=(3, *SHAPE)), rng.normal(size=(3, 3))
    found = []
    for frozen in (("body", "stem.bn"), ()):
        model = Model(network(), SHAPE, backend=backend, dtype="float64", fuse=fuse)
        rows, state = np.random.default_rng(0), model.state()
        norms = {n: rows.uniform(0.5, 1.5, a.shape) for n, a in state.items() if "bn" in n}
        model.load(state | norms)
        if frozen:
            model.freeze(*frozen)
        context = StepContext(training=bool(frozen), samples=np.arange(3))
        _, saved = model.forward(backend.asarray(x, "float64"), context)
        model.backward(backend.asarray(dy), saved)
        found.append(to_host(model.parameters["stem.conv.w"].grad).copy())
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-12)


def test_layers_that_run_no_backward_keep_nothing():
    model = Model(network(norm=False), SHAPE, backend="numpy")
    model.freeze("stem", "body")
    _, residuals = model.forward(np.ones((2, *SHAPE), "float32"), StepContext(training=True))
    layers = model.graph.nodes[1:]
    assert [node.name for node in layers if residuals[node.index] is not None] == ["head"]


@each("fuse", [True, False])
def test_a_frozen_norm_uses_its_running_statistics(rng, fuse):
    model = Model(network(), SHAPE, dtype="float64", fuse=fuse)
    train(model)
    model.freeze("*bn")
    x = rng.normal(size=(4, *SHAPE))
    training, _ = model.forward(x, StepContext(training=True, samples=np.arange(4)))
    np.testing.assert_allclose(training, model.predict(x), rtol=1e-9)


def test_more_may_be_frozen_and_thawed_between_two_calls_of_fit():
    model = Model(network(norm=False), SHAPE)
    trainer = train(model)
    velocity = trainer.optimizer.state()
    model.freeze("stem")
    stem = model.state()["stem.w"].copy()
    trainer.fit(data(), epochs=3, global_batch_size=8)
    assert "velocity/stem.w" not in trainer.optimizer.state()
    assert trainer.optimizer.iterations == 9
    np.testing.assert_array_equal(model.state()["stem.w"], stem)
    model.thaw("*")
    trainer.rebind()
    state = trainer.optimizer.state()
    assert not state["velocity/stem.w"].any()
    assert velocity["velocity/stem.w"].any()
    assert state["velocity/head.w"].any()
    trainer.fit(data(), epochs=4, global_batch_size=8)
    assert (model.state()["stem.w"] != stem).any()


@pytest.mark.threads(2)
def test_all_ranks_freeze_the_same_and_have_the_weights_of_rank_0(comm):
    model = Model(network(), SHAPE, seed=comm.rank)
    model.freeze("stem", "body")
    first = Model(network(), SHAPE, seed=0).state()
    train(model, comm=comm)
    np.testing.assert_array_equal(model.state()["stem.conv.w"], first["stem.conv.w"])
    model.thaw("stem" if comm.rank else "body")
    with pytest.raises(Exception, match="frozen parameters"):
        train(model, comm=comm)


@pytest.mark.threads(1, 2)
def test_a_run_with_frozen_layers_continues_to_the_same_bytes(comm, shared_path):
    def trainer(freeze: bool) -> Trainer:
        model = Model(network(), SHAPE)
        if freeze:
            model.freeze("stem", "body.0.body.a")
        return Trainer(model, SGD(0.1, momentum=0.9), exchange=AllReduce(comm))

    def fit(trainer: Trainer, epochs: int) -> dict[str, bytes]:
        trainer.fit(data(), epochs=epochs, global_batch_size=8)
        return values(trainer.model)

    whole, resumed = trainer(True), trainer(False)
    fit(whole, 1)
    save_checkpoint(shared_path, whole)
    assert load_checkpoint(shared_path, resumed) is not None
    assert "stem.conv.w" in resumed.model.frozen
    assert fit(resumed, 2) == fit(whole, 2)


@each(
    ("names", "words"),
    [
        (("sten",), "freeze: unknown layer 'sten'; did you mean 'stem'"),
        (("xyz",), "choose one of 'body', 'head', 'stem'"),
        ((), "expected names of layers, got none"),
        ((3,), "expected names of layers as text, got 3"),
    ],
)
def test_names_that_match_nothing_are_refused(names, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Model(network(), SHAPE).freeze(*names)


def test_models_that_cannot_be_trained_and_assignments_are_refused():
    model = Model(network(), SHAPE)
    p, layer = model.parameters["head.w"], model.layers[-1]
    with pytest.raises(AttributeError, match=r"use model.freeze\('head.w'\)"):
        p.requires_grad = False
    with pytest.raises(AttributeError, match=r"Linear: trainable cannot be .*freeze\('head'\)"):
        layer.trainable = False
    assert (p.requires_grad, layer.trainable) == (True, True)
    model.freeze("*")
    assert (p.requires_grad, layer.trainable) == (False, False)
    assert model.frozen == tuple(model.parameters)
    with pytest.raises(ValueError, match=r"got a model of which all are frozen; thaw some"):
        train(model)


def test_the_summary_counts_what_is_trained():
    model = Model(network(), SHAPE)
    whole = model.summary(8, slots=1)
    model.freeze("stem", "body")
    text = model.summary(8, slots=1)
    assert "frozen" not in whole
    gradients = sum(p.size for p in model.parameters.values() if not p.frozen)
    assert f"of which {gradients:,} trained and" in text


@pytest.mark.threads(2)
def test_a_run_that_was_loaded_may_be_frozen_before_it_continues(comm, shared_path):
    """The scheme's own arrays are those of the buckets that remain."""

    def trainer() -> Trainer:
        model = Model(network(norm=False), SHAPE, bucket_bytes=64)
        return Trainer(model, Adam(0.01), exchange=StaleGradients(comm))

    first = trainer()
    first.fit(data(), epochs=1, global_batch_size=8)
    save_checkpoint(shared_path, first)
    second = trainer()
    load_checkpoint(shared_path, second)
    second.model.freeze("stem")
    kept = second.model.state()["stem.w"].copy()
    second.fit(data(), epochs=2, global_batch_size=8)
    np.testing.assert_array_equal(second.model.state()["stem.w"], kept)
    assert (second.model.state()["head.w"] != first.model.state()["head.w"]).any()


def test_steps_and_checkpoints_wait_for_the_next_fit(tmp_path):
    trainer = train(Model(network(norm=False), SHAPE))
    trainer.model.freeze("stem")
    batch = next(iter(trainer.setup.loader(data(), 8, 1).epoch(0)))
    for call in (lambda: trainer.train_step(batch), lambda: save_checkpoint(tmp_path, trainer)):
        with pytest.raises(ValueError, match="frozen or thawed after the last fit; call fit"):
            call()
    trainer.fit(data(), epochs=3, global_batch_size=8)
    trainer.train_step(batch)
    save_checkpoint(tmp_path, trainer)
