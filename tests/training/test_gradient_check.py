"""A layer that forgets a gradient is named in the first step, before anything is sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.comm import Serial, run_threads
from pydtnn.layers import BatchNorm, Layer, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.sums import Sums
from pydtnn.tools.testing import check_layer
from pydtnn.utils.errors import RankError
from tests.each import each

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
DATA = ArrayDataset(X, np.arange(12) % 3)


class Forgets(Layer):
    """One factor per channel, which is never updated."""

    def build(self, *shapes: Any) -> Any:
        self.factor = self.parameter("factor", shapes[0][-1:], "ones")
        return shapes[0]

    def forward(self, *xs: Any, context: Any) -> Any:
        return xs[0] * self.factor.value, xs[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy * self.factor.value


class StoresHalf(Forgets):
    def backward(self, dy: Any, saved: Any) -> Any:
        self.factor.grad[:2] = (dy * saved).sum(axis=0)[:2]
        return dy * self.factor.value


def net(*layers: Layer) -> Sequential:
    return Sequential(Linear(4), *layers, Linear(3))


def trainer(model: Model, comm: Any, **options: Any) -> Trainer:
    return Trainer(model, SGD(0.1), exchange=AllReduce(comm), **options)


@each("options", [{}, {"dtype": "float64"}, {"dtype": "bfloat16"}, {"bucket_bytes": 1}])
@each("layer", [Forgets, StoresHalf])
def test_a_gradient_that_is_not_stored_is_named_in_the_first_step(layer, options):
    """Also where it shares memory with others that are used up."""
    model = Model(net(layer(name="forgets"), Linear(4)), (4,), backend="numpy", **options)
    words = f"forgets: backward of {layer.__name__} must store a gradient of the whole"
    with pytest.raises(ValueError, match=words):
        trainer(model, Serial()).fit(DATA, batch_size=6)


def test_all_ranks_are_told_before_anything_is_sent():
    def rank(comm: Any) -> None:
        model = Model(net(Forgets(name="forgets")), (4,), backend="numpy", bucket_bytes=1)
        trainer(model, comm).fit(DATA, batch_size=2)

    with pytest.raises(RankError, match=r"rank \d: forgets: backward of Forgets must store a grad"):
        run_threads(2, rank)


@each(
    ("exact", "options"),
    [
        (False, {"accumulation": 3, "sync_batch_norm": True}),
        (True, {}),
        (True, {"sync_batch_norm": True}),
    ],
)
def test_layers_that_store_all_gradients_train(exact, options):
    def rank(comm: Any) -> float:
        model = Model(net(BatchNorm(), ReLU()), (4,), backend="numpy", dtype="float16")
        exchange = AllReduce(comm, sums=partial(ExactSums, shards=4) if exact else Sums)
        trained = Trainer(model, SGD(0.1), exchange=exchange, **options)
        return trained.fit(DATA, batch_size=6)[0]["loss"]

    assert np.isfinite(run_threads(2, rank)).all()


def test_check_layer_says_the_same():
    with pytest.raises(AssertionError, match="Forgets in training: forgets: backward of Forgets m"):
        check_layer(Forgets(), (4,))
