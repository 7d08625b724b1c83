"""Objects know the arguments of their construction, and show them."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pydtnn import callbacks, layers, losses, metrics
from pydtnn.callbacks import EarlyStopping
from pydtnn.comm import Serial
from pydtnn.layers import Concat, Conv2d, Layer, LayerNorm, Linear, ReLU, Sequential, initializers
from pydtnn.losses import Loss
from pydtnn.optimizers import SGD, Adam
from pydtnn.parallel.schemes import LocalSGD
from pydtnn.schedules import Constant
from pydtnn.utils.arguments import construction_of
from pydtnn.utils.lazy import Named
from tests.each import each


class Given(Layer):
    def forward(self, *xs: Any, context: Any) -> Any:
        return xs[0], None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy


class Alone(Given):
    """Does not call the constructor of `Layer`."""

    __slots__ = ("scale",)

    def __init__(self, scale: float, *rest: int, mode: str = "a", **more: Any) -> None:
        self.scale = scale


class Passing(Conv2d):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


@dataclass(frozen=True)
class Weighted(Loss):
    weight: float = 1.0

    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        return 0.0


SHOWN = [
    (Conv2d(16, 3, padding=1), "Conv2d(16, 3, padding=1)"),
    (Conv2d(filters=16, kernel_size=(3, 1), stride=1), "Conv2d(16, (3, 1))"),
    (Linear(10, bias=False, name="head"), "Linear(10, bias=False, name='head')"),
    (SGD(Constant(0.1), momentum=0.9), "SGD(lr=Constant(lr=0.1), momentum=0.9)"),
    (losses.get_loss("cross_entropy"), "CategoricalCrossEntropy()"),
    (metrics.get_metric("top5_accuracy"), "TopKAccuracy()"),
    (LocalSGD(Serial(), period=4), "LocalSGD(Serial(rank 0 of 1), period=4)"),
    (Alone(2.0, 1, 2, mode="b", deep=True), "Alone(2.0, 1, 2, mode='b', deep=True)"),
    (Passing(4, 3, bias=False), "Passing(4, 3, bias=False)"),
    (Weighted(2.0), "Weighted(weight=2.0)"),
    (Linear(np.int64(3)), "Linear(3)"),
    (Alone(np.arange(1000.0)), "Alone(array(shape=(1000,), dtype=float64))"),
    (Alone(np.arange(2)), "Alone(array([0, 1]))"),
    (Linear(3, initializer=initializers.Constant(1)), "Linear(3, initializer=Constant(value=1))"),
    (Linear(3, initializer=np.zeros), "Linear(3, initializer=zeros)"),
]  # fmt: skip


@each(("made", "shown"), SHOWN)
def test_an_object_shows_the_arguments_that_differ_from_the_defaults(made, shown):
    assert repr(made) == shown


LAYERS = [
    layers.AvgPool3d((1, 2, 2), count_padding=False),
    layers.Branches(Linear(2), Linear(3), merge=Concat()),
    Conv2d(4, 3, padding=((0, 1), (1, 0)), bias_initializer="ones"),
    layers.Pad(((0, 1), (1, 0))),
    Sequential(Linear(2), Sequential(ReLU(), LayerNorm(epsilon=1e-3)), name="b"),
    layers.Slice(slice(0, 2), slice(None, None, 2)),
]


@each("layer", LAYERS)
def test_what_a_layer_shows_makes_an_equal_one(layer):
    shown = repr(layer)
    again = eval(shown, dict(Named("pydtnn.layers", layers.__all__)))
    assert type(again) is type(layer)
    assert repr(again) == shown


def test_a_copy_and_a_pickle_show_the_same():
    for made in (Conv2d(4, 3, padding="same"), Adam(lr=0.1), EarlyStopping(), Alone(1.0, 2)):
        assert repr(copy.deepcopy(made)) == repr(made)
        assert repr(pickle.loads(pickle.dumps(made))) == repr(made)


def test_signatures_and_their_errors_are_those_of_the_constructor():
    assert [*inspect.signature(Conv2d).parameters][:2] == ["filters", "kernel_size"]
    assert [*inspect.signature(Passing).parameters] == ["args", "options"]
    assert not inspect.signature(losses.MeanSquaredError).parameters
    with pytest.raises(TypeError, match="filters"):
        Conv2d(kernel_size=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="^MeanSquaredError: expected no argument without a name"):
        losses.MeanSquaredError(3)  # type: ignore[call-arg]


def test_arguments_are_known_by_name_and_not_copied():
    weights = np.zeros(3)
    assert construction_of(Alone(scale=weights)).bind().arguments["scale"] is weights  # type: ignore[arg-type]
    assert construction_of(callbacks.StopAtMetric("val_loss", 0.1)).bind().arguments["value"] == 0.1
