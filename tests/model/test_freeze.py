"""Frozen parameters are constants: no gradient, no message, no update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Checkpointer
from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset
from pydtnn.kernels import Backend
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    ReLU,
    Residual,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Adam
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.schemes import ShardedOptimizer, StaleGradients
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


def test_layers_that_run_no_backward_keep_nothing() -> None:
    model = Model(network(norm=False), SHAPE, backend="numpy")
    model.freeze("stem", "body")
    x = np.ones((2, *SHAPE), "float32")
    _, residuals = model.forward(x, StepContext(training=True, samples=np.arange(2)))
    kept = [node.name for node in model.graph.nodes if residuals[node.index] is not None]
    assert kept == ["head"]


def values(model: Model) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model.state().items()}


def train(model: Model, *, comm: Communicator | None = None, **options: Any) -> Trainer:
    optimizer = SGD(0.1, momentum=0.9, weight_decay=1e-2, **options)
    trainer = Trainer(model, optimizer, exchange=AllReduce(comm or Serial()))
    trainer.fit(data(), epochs=2, global_batch_size=8)
    return trainer


@each("fuse", [True, False])
@each("dtype", ["float32", "bfloat16"])
def test_frozen_values_and_statistics_do_not_change(fuse: bool, dtype: str) -> None:
    model = Model(network(), SHAPE, dtype=dtype, fuse=fuse)
    model.freeze("stem", "body.0.body.a")
    before = values(model)
    train(model)
    changed = {name for name, data in values(model).items() if data != before[name]}
    assert changed == {name for name in before if name.startswith(("body.0.body.b", "head"))}


@each("frozen", ["gamma", "beta"])
def test_statistics_change_while_a_parameter_of_their_norm_is_trained(frozen: str) -> None:
    model = Model(network(), SHAPE)
    model.freeze("stem", f"body.0.body.a.bn.{frozen}")
    before = values(model)
    train(model)
    assert values(model)["body.0.body.a.bn.running_mean"] != before["body.0.body.a.bn.running_mean"]


def test_freezing_equals_a_learning_rate_of_0(backend: Backend) -> None:
    """Without batch norm, the only difference is the work that is saved."""
    frozen, slow = (Model(network(norm=False), SHAPE, backend=backend) for _ in range(2))
    frozen.freeze("stem", "head.b")
    train(frozen)
    none = {"lr_factor": 0, "weight_decay": 0}
    train(slow, groups={"stem": none, "head.b": none})
    assert values(frozen) == values(slow)


def test_layers_before_which_everything_is_frozen_run_no_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(network(), SHAPE, fuse=False)
    model.freeze("stem", "body.0.body.a")
    ran = set()

    def spy(layer: Layer, inner: Any) -> Any:
        def backward(*args: Any) -> Any:
            ran.add(layer.name)
            return inner(*args)

        return backward

    for layer in model.layers:
        monkeypatch.setattr(layer, "backward", spy(layer, layer.backward))
    train(model)
    assert {name for name in ran if name and "conv" in name} == {"body.0.body.b.conv"}
    assert not any(name and name.startswith(("stem", "body.0.body.a")) for name in ran)


@pytest.mark.threads(2)
def test_only_trainable_parameters_are_sent(comm: Communicator) -> None:
    def sent(*patterns: str) -> tuple[int, int]:
        model = Model(network(norm=False), SHAPE)
        if patterns:
            model.freeze(*patterns)
        trainer = Trainer(model, SGD(0.1), exchange=AllReduce(comm))
        trainer.fit(data(), epochs=1, global_batch_size=8)
        before = trainer.comm.traffic.bytes
        trainer.fit(data(), epochs=2, global_batch_size=8)
        return trainer.comm.traffic.bytes - before, sum(b.grads.nbytes for b in model.buckets)

    (all_bytes, all_grads), (bytes_, grads) = sent(), sent("stem", "body")
    assert grads < all_grads / 20
    per_step = 3
    assert all_bytes - bytes_ > per_step * 0.8 * (all_grads - grads)


@each("fuse", [True, False])
def test_gradients_through_frozen_layers_are_those_of_finite_differences(
    backend: Backend, rng: np.random.Generator, fuse: bool
) -> None:
    model = Model(network(), SHAPE, backend=backend, dtype="float64", fuse=fuse)
    state = {n: rng.uniform(0.5, 1.5, a.shape) for n, a in model.state().items() if "bn" in n}
    model.load({**model.state(), **state})
    model.freeze("body", "stem.bn")  # frozen norms and convolutions after a trained convolution
    x = backend.asarray(rng.normal(size=(3, *SHAPE)), "float64")
    weight = rng.normal(size=(3, 3))
    context = StepContext(training=True, samples=np.arange(3))
    _, saved = model.forward(x, context)
    model.backward(backend.asarray(weight), saved)
    p = model.parameters["stem.conv.w"]
    grad = to_host(p.grad).copy()
    for index in ((0, 0, 0, 0), (3, 2, 1, 2), (2, 1, 1, 0)):
        sides = []
        for step in (1e-5, -1e-5):
            p.master[index] += step
            sides.append(float((to_host(model.forward(x, context)[0]) * weight).sum()))
            p.master[index] -= step
        expected = (sides[0] - sides[1]) / 2e-5
        assert grad[index] == pytest.approx(expected, rel=1e-5, abs=1e-8)


@each("fuse", [True, False])
def test_a_frozen_norm_uses_its_running_statistics(rng: np.random.Generator, fuse: bool) -> None:
    model = Model(network(), SHAPE, dtype="float64", fuse=fuse)
    train(model)
    model.freeze("*bn")
    x = rng.normal(size=(4, *SHAPE))
    training, _ = model.forward(x, StepContext(training=True, samples=np.arange(4)))
    np.testing.assert_allclose(training, model.predict(x), rtol=1e-9)


def test_more_may_be_frozen_and_thawed_between_two_calls_of_fit() -> None:
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


@pytest.mark.threads(1, 3)
def test_sharded_state_is_kept_for_the_parameters_that_remain(comm: Communicator) -> None:
    def run(exchange: Any) -> dict[str, np.ndarray]:
        model = Model(network(norm=False), SHAPE, dtype="float64")
        trainer = Trainer(model, Adam(0.01), exchange=exchange)
        trainer.fit(data(), epochs=1, global_batch_size=8)
        model.freeze("stem")
        trainer.fit(data(), epochs=2, global_batch_size=8)
        model.thaw("stem")
        trainer.fit(data(), epochs=3, global_batch_size=8)
        return model.state()

    serial, sharded = run(AllReduce(comm)), run(ShardedOptimizer(comm))
    for name in serial:
        np.testing.assert_allclose(sharded[name], serial[name], rtol=1e-9, atol=1e-12)


@pytest.mark.threads(2)
def test_frozen_weights_are_those_of_rank_0(comm: Communicator) -> None:
    model = Model(network(), SHAPE, seed=comm.rank)
    model.freeze("stem", "body")
    first = Model(network(), SHAPE, seed=0).state()
    train(model, comm=comm)
    np.testing.assert_array_equal(model.state()["stem.conv.w"], first["stem.conv.w"])


@pytest.mark.threads(2)
def test_all_ranks_must_freeze_the_same(comm: Communicator) -> None:
    model = Model(network(), SHAPE)
    model.freeze("stem" if comm.rank else "body")
    with pytest.raises(Exception, match="frozen parameters"):
        train(model, comm=comm)


@pytest.mark.threads(1, 2)
def test_a_run_with_frozen_layers_continues_to_the_same_bytes(
    comm: Communicator, tmp_path: Path
) -> None:
    def trainer(freeze: bool) -> Trainer:
        model = Model(network(), SHAPE)
        if freeze:
            model.freeze("stem", "body.0.body.a")
        callbacks = [Checkpointer(tmp_path, keep=9)] if freeze else []
        optimizer = SGD(0.1, momentum=0.9)
        return Trainer(model, optimizer, exchange=AllReduce(comm), callbacks=callbacks)

    def fit(trainer: Trainer, epochs: int) -> dict[str, bytes]:
        trainer.fit(data(), epochs=epochs, global_batch_size=8)
        return values(trainer.model)

    whole = fit(trainer(True), 2)
    comm.barrier()
    if comm.rank == 0:
        last = sorted(tmp_path.glob("checkpoint-*"))[-1]
        last.rename(tmp_path / "aside")
    comm.barrier()
    resumed = trainer(False)
    assert load_checkpoint(tmp_path, resumed) is not None
    assert "stem.conv.w" in resumed.model.frozen
    assert fit(resumed, 2) == whole


def test_names_that_match_nothing_are_refused() -> None:
    model = Model(network(), SHAPE)
    with pytest.raises(ValueError, match=r"freeze: unknown layer 'sten'; did you mean 'stem'"):
        model.freeze("sten")
    with pytest.raises(ValueError, match="choose one of 'body', 'head', 'stem'"):
        model.thaw("xyz")
    with pytest.raises(ValueError, match="expected names of layers, got none"):
        model.freeze()
    with pytest.raises(TypeError, match="expected names of layers as text, got 3"):
        model.freeze(3)  # type: ignore[arg-type]


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = Model(network(), SHAPE)
    model.freeze("*")
    assert model.frozen == tuple(model.parameters)
    with pytest.raises(ValueError, match=r"got a model of which all are frozen; thaw some"):
        train(model)
    model.thaw("head")
    train(model)


def test_assignments_that_would_do_nothing_are_refused() -> None:
    model = Model(network(), SHAPE)
    p, layer = model.parameters["head.w"], model.layers[-1]
    with pytest.raises(AttributeError, match=r"use model.freeze\('head.w'\)"):
        p.requires_grad = False
    with pytest.raises(AttributeError, match=r"Linear: trainable cannot be .*freeze\('head'\)"):
        layer.trainable = False
    assert (p.requires_grad, layer.trainable) == (True, True)
    model.freeze("head")
    assert (p.requires_grad, layer.trainable) == (False, False)


def test_the_summary_counts_what_is_trained() -> None:
    model = Model(network(), SHAPE)
    whole = model.summary(8, slots=1)
    model.freeze("stem", "body")
    text = model.summary(8, slots=1)
    assert "frozen" not in whole
    gradients = sum(p.size for p in model.parameters.values() if not p.frozen)
    assert f"of which {gradients:,} trained and" in text


@pytest.mark.threads(2)
def test_a_run_that_was_loaded_may_be_frozen_before_it_continues(
    comm: Communicator, shared_path: Path
) -> None:
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


def test_steps_and_checkpoints_wait_for_the_next_fit(tmp_path: Path) -> None:
    trainer = train(Model(network(norm=False), SHAPE))
    trainer.model.freeze("stem")
    batch = next(iter(trainer.setup.loader(data(), 8, 1).epoch(0)))
    for call in (lambda: trainer.train_step(batch), lambda: save_checkpoint(tmp_path, trainer)):
        with pytest.raises(ValueError, match="frozen or thawed after the last fit; call fit"):
            call()
    trainer.fit(data(), epochs=3, global_batch_size=8)
    trainer.train_step(batch)
    save_checkpoint(tmp_path, trainer)
