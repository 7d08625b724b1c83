"""The fusion pass changes how a network is computed, not what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, Deferred, create_backend
from pydtnn.layers import (
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Flatten,
    Identity,
    LeakyReLU,
    MaxPool2d,
    Net,
    ReLU,
    ReLU6,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from tests.each import each
from tests.model.networks import IMAGE, NETS, assert_same, conv, passes, residual, unit

NUMPY = create_backend("numpy")
SAME = 1e-11
"""Between two orders of the same float64 operations, for deep nets with few rows per channel."""

SOME = ("residual", "projection", "several readers", "ReLU between convolutions")


def both(name: str, backend: Backend = NUMPY, dtype: str = "float64") -> tuple[Model, Model]:
    """The network as it is written, and fused; with equal parameters, all of them random."""
    options: Any = {"backend": backend, "dtype": dtype, "input_gradient": True}
    models = [Model(NETS[name](), IMAGE, fuse=fuse, **options) for fuse in (False, True)]
    for model in models:
        rng = np.random.default_rng(1)
        for key in sorted(model.parameters):
            p = model.parameters[key]
            p.master += backend.asarray(0.1 * rng.normal(size=p.shape), dtype)
        for s in model.statistics.statistics:
            s.mean += 0.1
            s.variance *= 1.3
    return models[0], models[1]


@pytest.mark.few(16)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NETS)
def test_outputs_and_gradients_are_those_of_the_plain_network(backend, name, training):
    plain, fused = both(name, backend)
    assert_same(passes(fused, training=training), passes(plain, training=training), SAME)


@each(
    ("dtype", "options", "tolerance"),
    [
        ("float32", {}, 1e-4),  # 3 images; sums of a few hundred
        ("float64", {"micro_batches": 3}, SAME),
        ("float64", {"batch": 0}, 0.0),
    ],
)
@each("name", SOME)
def test_float32_micro_batches_and_empty_batches_agree(backend, name, dtype, options, tolerance):
    plain, fused = both(name, backend, dtype)
    assert_same(passes(fused, **options), passes(plain, **options), tolerance)


@each("name", NETS)
def test_inference_names_and_state_do_not_depend_on_fusion(backend, name):
    plain, fused = both(name, backend)
    x = np.random.default_rng(3).normal(size=(5, *IMAGE))
    results = ((y,) if isinstance(y := m.predict(x), np.ndarray) else y for m in (fused, plain))
    for y, wanted in zip(*results, strict=True):
        assert np.allclose(y, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())
    state = {key: array + 1 for key, array in plain.state().items()}
    fused.load(state)
    assert_same(fused.state(), state)


def kinds(net: Net, shape: tuple[int, ...] = IMAGE) -> list[str]:
    return [type(layer).__name__ for layer in Model(net, shape, backend="numpy", fuse=True).layers]


UNIT = ["FusedConv2d", "NormAddReLU"]


@each(
    ("net", "expected"),
    [
        (residual, [*UNIT * 3, "FusedConv2d"]),  # a block is two convolutions and two maps
        (
            lambda: Sequential(conv(4), ReLU(), conv(3), ReLU(), Flatten()),
            [*UNIT, "FusedConv2d", "Flatten"],
        ),
        (lambda: Sequential(Flatten(), BatchNorm()), ["Flatten", "BatchNorm"]),
        (lambda: Sequential(ReLU(), MaxPool2d(2)), ["ReLU", "MaxPool2d"]),
        (
            lambda: Sequential(
                conv(3), ReLU(), Branches(MaxPool2d(1), Identity(), merge=Concat()), Flatten()
            ),
            ["FusedConv2d", "MaxPool2d", "Identity", "Concat", "Flatten"],
        ),
    ],
)
def test_layers_are_fused_with_their_neighbours(net, expected):
    assert kinds(net()) == expected


@each("relu", [ReLU, ReLU6, LeakyReLU])
def test_a_relu_between_a_convolution_and_a_max_pool_runs_after_it(relu):
    def net(padding: int = 1) -> Net:
        return Sequential(conv(4), relu(), MaxPool2d(3, stride=2, padding=padding), Flatten())

    assert kinds(net()) == ["FusedConv2d", "MaxPool2d", relu.__name__, "Flatten"]
    plain, fused = (Model(net(), IMAGE, backend="cpu", fuse=f) for f in (False, True))
    assert_same(passes(fused), passes(plain))
    kept = forecast_memory(fused, 16).kept
    assert kept[2] < 16 * 4 * 8 * 6 * 4  # of the pool, in place of the convolution's output
    assert sum(kept) < sum(forecast_memory(plain, 16).kept)


def test_a_limited_relu_is_deferred_where_convolutions_apply_masks():
    units = NETS["norm and ReLU6"]
    assert kinds(units()) == [*UNIT * 2, "FusedConv2d", "MaxPool2d", "ReLU6"]
    without = replace(create_backend("numpy"), gates=False)
    model = Model(units(), IMAGE, backend=without, fuse=True)
    assert [type(layer).__name__ for layer in model.layers].count("ReLU6") == 3


def test_a_convolution_of_a_users_own_gets_arrays():
    class Own(Conv2d):
        def forward(self, *xs, context):
            assert not any(isinstance(x, Deferred) for x in xs)
            return super().forward(*xs, context=context)

    net = Sequential(*unit(4), Own(4, 3), BatchNorm(), ReLU(), conv(2))
    model = Model(net, IMAGE, backend="numpy", fuse=True)
    assert passes(model)["y0"].shape == (3, 6, 4, 2)


def test_a_deferred_output_with_one_reader_is_stored_only_where_memory_is_cheap(backend):
    model = both("biased convolution and norm", backend)[1]
    context = StepContext(training=True)
    _, residuals = model.forward(np.ones((2, *IMAGE)), context)
    (value,) = residuals[3]  # of the second convolution
    assert isinstance(value, Deferred)
    assert (value.array is not None) == backend.keeps_values
