"""NaN and infinities go through layers as in PyTorch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.kernels import create_backend
from pydtnn.layers import Layer, StepContext
from pydtnn.model import Model
from tests.random_cases import Cases

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6.0, 50.0, -50.0, 800.0, -800.0])
LAYERS: dict[str, Callable[[], Layer]] = {
    "relu": layers.ReLU,
    "relu6": layers.ReLU6,
    "leaky relu": layers.LeakyReLU,
    "elu": layers.ELU,
    "sigmoid": layers.Sigmoid,
    "tanh": layers.Tanh,
    "arctan": layers.ArcTan,
    "log": layers.Log,
    "gelu": layers.GELU,
    "silu": layers.SiLU,
    "softmax": layers.Softmax,
    "layer norm": layers.LayerNorm,
    "group norm": lambda: layers.GroupNorm(2),
    "batch norm": layers.BatchNorm,
    "max pool": lambda: layers.MaxPool2d(2),
    "mean pool": lambda: layers.AvgPool2d(2, stride=1),
    "global mean pool": layers.GlobalAvgPool2d,
}
RARE = ("layer norm", "group norm", "batch norm", "softmax", "global mean pool")


def draw(rng: np.random.Generator, shape: tuple[int, ...], share: float) -> np.ndarray:
    x = 3 * rng.normal(size=shape)
    return np.where(rng.random(shape) < share, rng.choice(SPECIAL, size=shape), x)


@pytest.mark.fuzz("networks")
@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_what_is_not_finite_passes_as_in_pytorch(cases: Cases) -> None:
    from benchmarks.torch_twin import Twin, to_ours, to_torch

    backends = [create_backend("numpy"), create_backend("cpu", threads=1)]
    for case in cases:
        name = [*LAYERS][case.number % len(LAYERS)]
        x = draw(case.rng, (3, 4, 6, 4), 0.01 if name in RARE else 0.2)
        for backend in backends:
            options = {"backend": backend, "dtype": "float64", "input_gradient": True}
            model = Model(LAYERS[name](), x.shape[1:], **options)
            dy = case.rng.normal(size=(len(x), *model.output_shape))
            theirs = to_torch(x.copy()).requires_grad_()
            output = Twin(model)(theirs * 1)
            output.backward(to_torch(dy))
            y, saved = model.forward(x.copy(), StepContext(training=True))
            # in norm layers sums of an infinity are infinite or NaN by their order
            case.compare(np.testing.assert_allclose, y, to_ours(output), rtol=1e-9, atol=1e-12)
            dx, expected = model.backward(dy.copy(), saved), to_ours(theirs.grad)
            if name == "max pool":  # of several NaN, PyTorch's last wins, and our first
                windows = (3, 2, 2, 3, 2, 4)
                dx, expected = (a.reshape(windows).sum(axis=(2, 4)) for a in (dx, expected))
            if (
                name == "relu6"
            ):  # PyTorch's kernels stop the gradient at NaN, or not, by their place
                dx, expected = dx[~np.isnan(x)], expected[~np.isnan(x)]
            case.compare(np.testing.assert_allclose, dx, expected, rtol=1e-9, atol=1e-12)
