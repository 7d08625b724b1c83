"""Gradients that are used up in backward: the same bytes, in less memory, and kept where read."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pydtnn import SGD, Adam, Model, Trainer
from pydtnn.callbacks import Callback
from pydtnn.comm import Serial
from pydtnn.data import ArrayDataset, Batch
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Residual,
    Sequential,
    StepContext,
)
from pydtnn.model.memory import forecast_memory
from pydtnn.parallel.exchange import AllReduce
from pydtnn.utils.observer import Observer
from tests.each import each

SHAPE = (6, 6, 3)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(7, *SHAPE)).astype("float32"), RNG.integers(5, size=7)
RULES = [partial(SGD, 0.1, momentum=0.9, weight_decay=0.01), partial(Adam, 0.01)]


def convolutional() -> Net:
    block = Sequential(Conv2d(7, 3, padding=1, bias=False), BatchNorm(), ReLU())
    last = Sequential(Conv2d(11, 1), BatchNorm(), ReLU(), MaxPool2d(2), Flatten(), Linear(5))
    return Sequential(Conv2d(7, 3, padding=1), Residual(block), last)


def shared() -> Net:
    """A matrix that two layers have, and one of which begins last."""
    twice = Linear(13)
    return Sequential(Flatten(), Linear(13), twice, ReLU(), Linear(13), twice, ReLU(), Linear(5))


def trainer(net: Net, rule: Any = RULES[0], **options: Any) -> Trainer:
    names = {"backend", "bucket_bytes", "dtype", "recompute"} & options.keys()
    own = {name: options.pop(name) for name in names}
    model = Model(net, SHAPE, seed=1, **({"backend": "numpy", "bucket_bytes": 1} | own))
    options = {"exchange": AllReduce(Serial()), "progress": False} | options
    found = Trainer(model, rule(), **options)
    found.exchange.start(model.buckets)
    return found


def batch(samples: int = 7) -> Batch:
    return Batch(X[:samples], Y[:samples], np.arange(samples), 0, samples)


def values(own: Trainer) -> list[bytes]:
    state = own.optimizer.state()
    slots = [state[name] for name in sorted(state) if "/" in name]
    return [a.tobytes() for a in (*own.model.state().values(), *slots)]


def gradient_bytes(model: Model) -> int:
    return sum(buffer.grads.nbytes for buffer in model.buffers)


@each(
    ("net", "rule", "options"),
    [
        (convolutional, RULES[0], {"bucket_bytes": 500}),
        (convolutional, RULES[1], {"backend": "cpu"}),
        (convolutional, RULES[0], {"dtype": "bfloat16", "bucket_bytes": 1 << 20}),
        (shared, RULES[1], {"dtype": "bfloat16"}),
        (shared, RULES[0], {"backend": "cpu", "bucket_bytes": 500}),
        (shared, RULES[1], {"bucket_bytes": 1 << 20}),
    ],
)
def test_training_computes_the_same_bytes(net, rule, options):
    used, kept = (trainer(net(), rule, keep_gradients=keep, **options) for keep in (False, True))
    for samples in (7, 7, 7, 7, 3, 7):  # the loops, a recording, and repetitions
        losses = [own.train_step(batch(samples)).values.tobytes() for own in (used, kept)]
        assert losses[0] == losses[1]
    assert values(used) == values(kept)
    for bucket in used.model.buckets:  # padding is 0, as norms of all values require
        covered = np.ones(len(bucket.values), bool)
        for entry in bucket.parameters:
            covered[entry.slice] = False
        assert not bucket.values[covered].any()
    assert all(p.grad is None for p in used.model.parameters.values())
    assert all(p.grad is not None for p in kept.model.parameters.values())


def test_gradients_that_are_not_written_at_the_same_time_share_memory():
    own = trainer(Sequential(Flatten(), *(Linear(64) for _ in range(8)), Linear(5)))
    whole = sum(bucket.values.nbytes for bucket in own.model.buckets)
    assert gradient_bytes(own.model) == max(b.grads.nbytes for b in own.model.buckets) + 256
    assert forecast_memory(own.model, 7).gradients == gradient_bytes(own.model) < whole / 3
    begin = {p.name: n.index for n in own.model.graph.nodes for p in n.layer.parameters}
    for one in own.model.buckets:
        for other in own.model.buckets[: one.index]:
            first = max(begin[entry.name] for entry in one.parameters)
            apart = other.ready_at > first or not np.shares_memory(one.grads, other.grads)
            assert apart


class Reads(Callback):
    """A callback of a user."""

    def on_step_end(self, trainer: Any) -> None:
        assert all(np.isfinite(p.grad).all() for p in trainer.model.parameters.values())


class Plain(Callback):
    reads_gradients = False


class Halved(SGD):
    """A rule that may use all gradients before the update."""

    def begin_step(self) -> None:
        super().begin_step()


@each(
    ("options", "kept"),
    [
        ({}, False),
        ({"callbacks": [Plain()]}, False),
        ({"keep_gradients": True}, True),
        ({"callbacks": [Reads()]}, True),
        ({"callbacks": [lambda trainer: None]}, True),
        ({"accumulation": 2}, True),
        ({"observers": [Observer()]}, True),
        ({"rule": partial(SGD, 0.1, clip_norm=1.0)}, True),
        ({"rule": partial(Halved, 0.1)}, True),
        ({"dtype": "float16"}, True),
    ],
)
def test_gradients_are_kept_for_those_who_may_read_them(options, kept):
    own = trainer(convolutional(), **options)
    own.train_step(batch())
    whole = sum(bucket.values.nbytes for bucket in own.model.buckets)
    assert (gradient_bytes(own.model) == whole) is kept
    assert all((p.grad is not None) is kept for p in own.model.parameters.values())


def test_a_pass_of_ones_own_has_its_gradients_between_steps_of_a_trainer():
    used, kept = trainer(convolutional()), trainer(convolutional(), keep_gradients=True)
    for _ in range(3):
        for own in (used, kept):
            own.train_step(batch())
        found = []
        for model in (used.model, kept.model):
            context = StepContext(training=True, samples=np.arange(7))
            y, saved = model.forward(X, context)
            model.backward(np.ones_like(y), saved)
            found.append([p.grad.tobytes() for p in model.parameters.values()])
        assert found[0] == found[1]
    assert values(used) == values(kept)


def test_frozen_layers_are_thawed():
    data, trained = ArrayDataset(X, Y), []
    for keep in (False, True):
        own = trainer(convolutional(), keep_gradients=keep)
        own.model.freeze("conv2d0")
        own.fit(data, batch_size=3)
        own.model.thaw("conv2d0")
        own.fit(data, batch_size=3, more_epochs=1)
        trained.append(values(own))
        assert all((p.grad is not None) is keep for p in own.model.parameters.values())
    assert trained[0] == trained[1]
