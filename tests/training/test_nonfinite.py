"""A loss that is no number ends training before the parameters are touched, and says where."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer, create_backend
from pydtnn.comm import Communicator, Serial, create_communicator
from pydtnn.kernels.autotuner import Autotuner
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, Log, ReLU, Reshape, Sequential
from pydtnn.losses import Loss
from pydtnn.metrics import Metric
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.nonfinite import NotFiniteError
from tests.each import each


class Infinite(Loss):
    """No number, whatever the predictions."""

    def compute(self, backend, y, target, scale, out):
        out[...] = 0
        return np.inf * len(y)


def trainer(comm: Communicator, *, loss: Loss | str = "cross_entropy", log: bool = False):
    middle = Log(name="log") if log else ReLU(name="relu")
    net = Sequential(Linear(4, name="first"), middle, Linear(3, name="last"))
    return Trainer(Model(net, (2,), backend="numpy"), SGD(0.1), loss=loss, exchange=AllReduce(comm))


def data(bad: float = 0.0) -> ArrayDataset:
    """Eight samples of which the last has `bad` in its first feature."""
    x = np.random.default_rng(0).normal(size=(8, 2))
    x[-1, 0] += bad
    return ArrayDataset(x, np.arange(8) % 3)


@each(
    ("options", "bad", "where"),
    [
        ({}, np.nan, "first in the input of sample 7, column 0; clean the data$"),
        ({"log": True}, 0.0, r"first in the output of log \(Log\);"),
        ({"loss": Infinite()}, 0.0, "first in the loss itself;"),
    ],
)
def test_the_first_place_is_named_and_the_parameters_stay(options, bad, where):
    run = trainer(create_communicator("serial"), **options)
    before = {name: value.copy() for name, value in run.model.state().items()}
    with pytest.raises(NotFiniteError, match=r"not finite at epoch 1, step 1: " + where):
        run.fit(data(bad), global_batch_size=8)
    for name, value in run.model.state().items():
        np.testing.assert_array_equal(value, before[name])


@each(
    ("shape", "where"),
    [((), "sample 5;"), ((3,), "sample 5, column 1;"), ((3, 2), r"sample 5, position \(1, 0\);")],
)
def test_a_target_that_is_not_finite_is_named(shape, where):
    y = np.zeros((8, *shape))
    y[(5, 1, 0)[: y.ndim]] = np.nan
    net = Sequential(Linear(y[0].size), Reshape(shape or (1,)))
    run = Trainer(Model(net, (2,), backend="numpy"), SGD(0.1), loss="mse", metrics=())
    held = ArrayDataset(np.zeros((8, 2)), y)
    for data in (held, held.subset(range(8))):
        with pytest.raises(NotFiniteError, match=f"first in the target of {where} clean the data"):
            run.fit(data, global_batch_size=4, seed=1)


class NoNumber(Metric):
    """Not finite, whatever the predictions."""

    name = "own"

    def compute(self, xp, y, target):
        return np.nan


@each(
    ("bad", "words"),
    [
        (1e6, "first in the input, which exceeds 65504, the .* of float16; scale the input, or"),
        (np.nan, "first in the input of sample"),
    ],
)
def test_an_input_beyond_the_range_of_float16_is_told_so(bad, words):
    run = Trainer(Model(Linear(3), (2,), backend="numpy", dtype="float16"), SGD(0.1))
    with pytest.raises(NotFiniteError, match=words):
        run.fit(data(bad), global_batch_size=8)


def test_a_metric_that_is_not_finite_is_named():
    model = Model(Linear(3), (2,), backend="numpy")
    run = Trainer(model, SGD(0.1), metrics=["accuracy", NoNumber()], exchange=AllReduce(Serial()))
    words = "^the metric own is not finite {}.*first in the metric own itself; remove it, or"
    with pytest.raises(NotFiniteError, match=words.format("at epoch 1, ")):
        run.fit(data(), global_batch_size=8)
    with pytest.raises(NotFiniteError, match=words.format("in the eval")):
        run.evaluate(data())


@pytest.mark.threads(3)
def test_all_ranks_raise_and_name_the_rank(comm):
    """Without shuffling: the evaluation's last sample is the last rank's."""
    words = "evaluation: first in the input of sample 7, column 0 on rank 2; clean the"
    with pytest.raises(NotFiniteError, match=words):
        trainer(comm).evaluate(data(np.inf), global_batch_size=8)


def test_training_that_goes_on_afterwards_has_sane_running_statistics():
    """A user may catch the error and leave the batch out."""
    net = Sequential(Linear(4), BatchNorm(name="norm"), Linear(3))
    run = Trainer(Model(net, (2,), backend="numpy"), SGD(0.1), exchange=AllReduce(Serial()))
    with pytest.raises(NotFiniteError):
        run.fit(data(np.nan), global_batch_size=8)
    assert run.exchange.samples == 0
    assert not len(run.exchange.in_flight)
    run.fit(data(), global_batch_size=8)
    assert run.exchange.samples == 8
    assert all(np.isfinite(value).all() for value in run.model.state().values())


@each(("wrong", "fuse"), [("narrow", True), ("wide", True), ("wide", False), ("next", True)])
def test_an_infinity_that_winograd_spreads_is_traced_to_the_layer_that_made_it(
    monkeypatch, wrong, fuse
):
    monkeypatch.setattr(Autotuner, "_choose", lambda *_: ("winograd4", "for this test"))
    net = Sequential(
        Conv2d(3, 1, name="narrow"),
        Conv2d(4, 3, padding=1, name="wide"),
        ReLU(name="relu"),
        Conv2d(4, 3, padding=1, name="next"),
        BatchNorm(name="norm"),
        Flatten(),
        Linear(3),
    )
    model = Model(net, (9, 9, 2), backend=create_backend("cpu", threads=1), fuse=fuse)
    model.parameters[f"{wrong}.w"].master[1] = 1e38
    x = np.random.default_rng(0).normal(size=(4, 9, 9, 2)).astype("float32")
    x[2, 4, 4] = 1e3
    run = Trainer(model, SGD(0.1), exchange=AllReduce(Serial()))
    with pytest.raises(NotFiniteError, match=f"first in the output of {wrong} "):
        run.fit(ArrayDataset(x, np.arange(4) % 3), global_batch_size=4)
