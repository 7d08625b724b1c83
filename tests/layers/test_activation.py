"""Activation layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pydtnn import layers as nn
from pydtnn.model import Model
from tests.each import each

FORMULAS: dict[str, tuple[Callable, Callable[[float], float]]] = {
    "relu": (nn.ReLU, lambda x: max(x, 0.0)),
    "relu6": (nn.ReLU6, lambda x: min(max(x, 0.0), 6.0)),
    "leaky relu": (nn.LeakyReLU, lambda x: x if x > 0 else 0.01 * x),
    "leaky relu, steeper than 1": (lambda: nn.LeakyReLU(1.5), lambda x: x if x > 0 else 1.5 * x),
    "elu": (nn.ELU, lambda x: x if x > 0 else math.expm1(x)),
    "elu, alpha 0.3": (lambda: nn.ELU(0.3), lambda x: x if x > 0 else 0.3 * math.expm1(x)),
    "sigmoid": (nn.Sigmoid, lambda x: 1 / (1 + math.exp(-x))),
    "tanh": (nn.Tanh, math.tanh),
    "arctan": (nn.ArcTan, math.atan),
    "gelu": (
        nn.GELU,
        lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "exact gelu": (lambda: nn.GELU("none"), lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
    "silu": (nn.SiLU, lambda x: x / (1 + math.exp(-x))),
    "hard sigmoid": (nn.HardSigmoid, lambda x: min(max(x / 6 + 0.5, 0.0), 1.0)),
    "softplus": (nn.Softplus, lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x)))),
    "hard swish": (nn.HardSwish, lambda x: x * min(max(x / 6 + 0.5, 0.0), 1.0)),
}


@each("name", FORMULAS)
def test_activations_compute_their_formula(name, backend):
    make, formula = FORMULAS[name]
    x = np.array([[-30.0, -3.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.5, 6.5, 30.0]])
    y = Model(make(), x.shape[1:], backend=backend, dtype="float64").predict(x)
    np.testing.assert_allclose(y[0], [formula(v) for v in x[0]], rtol=1e-12, atol=1e-12)


def test_softmax_gives_probabilities_even_of_large_logits(backend):
    model = Model(nn.Softmax(), (3,), backend=backend, dtype="float64")
    y = model.predict(np.array([[1000.0, 1000.0, -1000.0], [0.0, math.log(2), math.log(5)]]))
    np.testing.assert_allclose(y, [[0.5, 0.5, 0], [1 / 8, 2 / 8, 5 / 8]], rtol=1e-12)


@each("layer", [nn.ReLU, nn.ReLU6])
def test_what_a_relu_was_given_as_nan_does_not_stop_the_gradient(layer, backend):
    for dtype in ("float32", "float64"):
        model = Model(layer(), (21,), backend=backend, dtype=dtype, input_gradient=True)
        x, dy = np.ones((2, 21), dtype), np.full((2, 21), np.nan, dtype)
        x[0], x[1, ::2] = np.nan, -1
        y, saved = model.forward(backend.asarray(x), nn.StepContext(training=True))
        dx = backend.to_numpy(model.backward(backend.asarray(dy), saved))
        assert np.array_equal(np.isnan(backend.to_numpy(y)), np.isnan(x))
        assert np.array_equal(np.isnan(dx), ~(x < 0))
        assert not dx[x < 0].any()
