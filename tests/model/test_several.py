"""Models with several inputs and outputs are trained like any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import BestWeights, EarlyStopping
from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset, Batch, Loader
from pydtnn.layers import (
    BatchNorm,
    Block,
    Concat,
    Conv2d,
    Flatten,
    Linear,
    Log,
    ReLU,
    Sequential,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.schemes import LocalSGD
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.small_training import fingerprint


class Two(Block):
    """Images and numbers in; classes and a number out."""

    def __init__(self, *, norm: bool = True, log: bool = False) -> None:
        super().__init__()
        extra = [BatchNorm()] if norm else []
        self.look = Sequential(Conv2d(3, 3), *extra, ReLU(), Flatten(), name="look")
        self.both, self.hidden = Concat(name="both"), Sequential(Linear(6), Tanh(), name="hidden")
        self.kind = Linear(3, name="kind")
        self.size = Sequential(*([Log(name="log")] if log else []), Linear(1), name="size")

    def wire(self, graph: Any, *inputs: Any) -> Any:
        image, numbers = inputs
        seen = graph.add(self.look, image)
        hidden = graph.add(self.hidden, graph.add(self.both, seen, numbers))
        return graph.add(self.kind, hidden), graph.add(self.size, hidden)


def data(n: int = 21, *, seed: int = 0, integers: bool = False) -> ArrayDataset:
    rng = np.random.default_rng(seed)
    images: Any = rng.normal(size=(n, 4, 4, 2))
    if integers:
        images = rng.integers(0, 256, images.shape, dtype=np.uint8)
    y = rng.integers(0, 3, n)
    y[:3] = 0, 1, 2
    return ArrayDataset((images, rng.normal(size=(n, 5))), (y, rng.normal(size=(n, 1))))


def make(**options: Any) -> Model:
    return Model(Two(**options), ((4, 4, 2), (5,)), backend="numpy", dtype="float64", seed=1)


def trainer(
    exchange: GradientExchange | None = None, *, model: Model | None = None, **options: Any
) -> Trainer:
    defaults = {"loss": ["cross_entropy", "mse"], "metrics": [["accuracy"], ["mae"]]}
    options = {**defaults, "loss_weights": [0.7, 2.0], **options}
    return Trainer(
        model or make(),
        SGD(0.05, momentum=0.9),
        exchange=exchange or AllReduce(Serial()),
        **options,
        keep_gradients=True,
    )


def reference_losses(model: Model, batch: Batch) -> np.ndarray:
    """Sums of both losses, written out."""
    from pydtnn.layers import StepContext

    (logits, size), _ = model.forward(batch.x, StepContext(training=True, samples=batch.samples))
    model.statistics.begin_step()
    kinds, sizes = batch.y
    top = logits - logits.max(axis=1, keepdims=True)
    logs = top - np.log(np.exp(top).sum(axis=1, keepdims=True))
    return np.array([-logs[np.arange(len(kinds)), kinds].sum(), ((size - sizes) ** 2).sum()])


def one_batch(n: int = 7) -> Batch:
    with Loader(data(n), global_batch_size=n, dtype="float64", prefetch=0) as loader:
        return next(loader.epoch(0))


def test_gradients_are_those_of_the_weighted_sum_of_the_losses():
    weights, batch, run = np.array([0.7, 2.0]), one_batch(), trainer()
    run.exchange.start(run.model.buckets)
    run.optimizer.schedule = lambda step: 0.0
    expected = reference_losses(run.model, batch)
    totals = run.train_step(batch)
    values = dict(zip(totals.names, totals.values, strict=False))
    assert list(values) == [
        "loss",
        "output0.loss",
        "output0.accuracy",
        "output1.loss",
        "output1.mae",
    ]
    np.testing.assert_allclose(
        [values["output0.loss"], values["output1.loss"], values["loss"]],
        [*expected, weights @ expected],
        rtol=1e-12,
    )
    step = 1e-6
    for parameter in run.model.parameters.values():
        flat, gradient = parameter.master.reshape(-1), parameter.grad.reshape(-1).copy()
        for i in range(0, len(flat), 3):
            value, around = flat[i], []
            for flat[i] in (value + step, value - step):
                around.append(weights @ reference_losses(run.model, batch) / len(batch))
            flat[i] = value
            slope = (around[0] - around[1]) / (2 * step)
            # central differences of values near 1: 1e-16 / 1e-6 of rounding, 1e-12 of curvature
            assert gradient[i] == pytest.approx(slope, rel=1e-6, abs=2e-9), (parameter.name, i)


def fit(run: Trainer, epochs: int = 2, **options: Any) -> list[dict[str, float]]:
    options = {"global_batch_size": 8, "seed": 2, **options}
    return run.fit(data(), data(9, seed=1), epochs=epochs, **options)


def weights_of(run: Trainer) -> np.ndarray:
    return np.concatenate([p.master.reshape(-1) for p in run.model.parameters.values()])


@pytest.mark.threads(1, 2)
def test_a_run_that_is_resumed_ends_in_the_same_bytes(comm, shared_path):
    def make_run() -> Trainer:
        watch = EarlyStopping("val_output1.mae", 5)
        best = BestWeights(shared_path / "best", "val_output0.accuracy")
        return trainer(LocalSGD(comm), callbacks=[watch, best])

    whole, rest = make_run(), make_run()
    fit(whole, 1)
    save_checkpoint(shared_path / "run", whole)
    assert load_checkpoint(shared_path / "run", rest)
    fit(rest, 3)
    fit(whole, 3)
    assert fingerprint(rest) == fingerprint(whole)
    for prefix in ("", "val_"):
        last = {name: whole.history[-1][prefix + name] for name in whole.objective.names}
        together = 0.7 * last["output0.loss"] + 2 * last["output1.loss"]
        assert last["loss"] == pytest.approx(together, rel=1e-12)


@pytest.mark.threads(2)
def test_ranks_and_micro_batches_train_like_one_rank(comm):
    plain = trainer(model=make(norm=False))
    expected = fit(plain)
    for accumulation in (1, 2):
        run = trainer(AllReduce(comm), model=make(norm=False), accumulation=accumulation)
        for mine, theirs in zip(fit(run), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        np.testing.assert_allclose(weights_of(run), weights_of(plain), rtol=1e-9, atol=1e-12)


def test_pixels_of_one_input_are_normalised_and_numbers_of_another_are_not():
    mixed = data(integers=True)
    with Loader(mixed, global_batch_size=21, shuffle=False, dtype="float64", prefetch=0) as loader:
        batch = next(loader.epoch(0))
    np.testing.assert_allclose(batch.x[0].mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(batch.x[0].std(axis=(0, 1, 2)), 1, rtol=1e-12)
    np.testing.assert_array_equal(batch.x[1], mixed.x[1])
    part = mixed.subset([3, 4])
    for read, loaded in zip(
        part.normalize(part.read(np.arange(2))[0], "float64"), batch.x, strict=True
    ):
        np.testing.assert_array_equal(read, loaded[3:5])


@pytest.mark.threads(1, 2)
def test_what_is_not_finite_is_named(comm):
    run = trainer(AllReduce(comm), model=make(log=True))
    words = r"^the output1.loss is not finite at epoch 1, step 1: first in the output of size.log "
    with pytest.raises(NotFiniteError, match=words):
        fit(run)


class Three(Block):
    """A classifier with two auxiliary ones."""

    def wire(self, graph: Any, *inputs: Any) -> Any:
        hidden = graph.add(Sequential(Linear(6), Tanh(), name="hidden"), *inputs)
        return tuple(graph.add(Linear(3, name=name), hidden) for name in ("main", "one", "two"))


def three(comm: Communicator | None = None, **options: Any) -> Trainer:
    model = Model(Three(), (5,), backend="numpy", dtype="float64", seed=1)
    exchange = AllReduce(comm or Serial())
    return Trainer(model, SGD(0.05, momentum=0.9), exchange=exchange, **options)


def vectors(targets: int) -> tuple[ArrayDataset, ArrayDataset]:
    """Training and validation set with the same labels once or several times."""
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 5)), rng.integers(3, size=n)) for n in (21, 9)]
    sets = (ArrayDataset(x, y if targets == 1 else (y,) * targets) for x, y in parts)
    return next(sets), next(sets)


@pytest.mark.threads(1, 2)
def test_auxiliary_outputs_are_trained_with_the_first_and_not_evaluated(comm):
    auxiliary = three(comm, auxiliary_weights=[0.3, 0.4])
    short = auxiliary.fit(*vectors(1), epochs=2, global_batch_size=8, seed=2)
    several = three(
        comm, loss=["cross_entropy"] * 3, loss_weights=[1, 0.3, 0.4], metrics=[["accuracy"], [], []]
    )
    long = several.fit(*vectors(3), epochs=2, global_batch_size=8, seed=2)
    np.testing.assert_array_equal(weights_of(auxiliary), weights_of(several))
    for ours, other in zip(short, long, strict=True):
        same = {"loss": "loss", "accuracy": "output0.accuracy"}
        same |= {"val_loss": "val_output0.loss", "val_accuracy": "val_output0.accuracy"}
        for name, written_out in same.items():
            assert ours[name] == other[written_out], name
        assert other["val_loss"] > other["val_output0.loss"] + 0.1
        assert not any(name.startswith(("output", "val_output")) for name in ours)
    alone = auxiliary.evaluate(vectors(1)[1])["loss"]  # in batches of another size
    assert alone == pytest.approx(short[-1]["val_loss"], rel=1e-12)


@each(
    ("make_trainer", "options", "words"),
    [
        (trainer, {"loss": "mse"}, r"loss must be a list of 2, .* pass auxiliary_weights if"),
        (trainer, {"loss": ["mse"] * 3}, r"loss must be a list of 2, one for .*got \['mse', "),
        (trainer, {"loss_weights": [1.0]}, r"loss_weights must be a list of 2, .* got \[1.0\]"),
        (trainer, {"loss_weights": [1, -1]}, "a weight of loss_weights must be at least 0"),
        (trainer, {"metrics": ["mse", "mae"]}, "metrics must be 2 lists, one for each output"),
        (three, {"auxiliary_weights": [0.3]}, r"auxiliary_weights must be a list of 2"),
        (three, {"auxiliary_weights": 0.3}, "auxiliary_weights must be a list of 2, .* got 0.3"),
        (three, {"auxiliary_weights": [0.3, -1]}, "a weight of auxiliary_weights must be at"),
        (three, {"auxiliary_weights": [1, 1], "loss_weights": [1] * 3}, "used together"),
    ],
)
def test_an_objective_that_does_not_fit_the_outputs_is_refused(make_trainer, options, words):
    with pytest.raises(ValueError, match=f"^Trainer: .*{words}"):
        make_trainer(**options)


def test_data_that_do_not_fit_the_model_are_refused():
    source = data()
    one_target = ArrayDataset(source.x, source.y[0])
    with pytest.raises(ValueError, match=r"^Trainer: expected 2 targets, one for .* got 1"):
        trainer().fit(one_target, global_batch_size=8)
    one_input = ArrayDataset(source.x[0], source.y)
    with pytest.raises(ValueError, match=r"^Model: expected an array of shape \(n, 4, 4, 2\) and"):
        trainer().fit(one_input, global_batch_size=8)
    with pytest.raises(ValueError, match="^array: classes must be a tuple with one number"):
        ArrayDataset(source.x, source.y, classes=3)
