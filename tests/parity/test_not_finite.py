"""NaN and infinities go through layers and losses as in PyTorch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.kernels import create_backend
from pydtnn.layers import Layer, StepContext
from pydtnn.losses import get_loss
from pydtnn.model import Model

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6.0, 50.0, -50.0, 800.0, -800.0])
LAYERS: dict[str, Callable[[], Layer]] = {
    **{kind.__name__: kind for kind in (layers.ReLU, layers.ReLU6, layers.LeakyReLU, layers.ELU)},
    **{kind.__name__: kind for kind in (layers.Sigmoid, layers.Tanh, layers.ArcTan, layers.Log)},
    **{"gelu": layers.GELU, "exact gelu": partial(layers.GELU, "none"), "silu": layers.SiLU},
    **{"softmax": layers.Softmax, "layer norm": layers.LayerNorm, "batch norm": layers.BatchNorm},
    **{"group norm": partial(layers.GroupNorm, 2), "max pool": partial(layers.MaxPool2d, 2)},
    **{"mean pool": partial(layers.AvgPool2d, 2, stride=1)},
    "global mean pool": layers.GlobalAvgPool2d,
}
LIMITS = ("gelu", "exact gelu", "silu")
"""Activations that are their limits at infinity (`tests/kernels/test_elementwise.py`)."""
RARE = ("layer norm", "group norm", "batch norm", "softmax", "global mean pool")


def draw(rng: np.random.Generator, shape: tuple[int, ...], share: float) -> np.ndarray:
    x = 3 * rng.normal(size=shape)
    return np.where(rng.random(shape) < share, rng.choice(SPECIAL, size=shape), x)


@pytest.mark.fuzz("networks")
@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_what_is_not_finite_passes_as_in_pytorch(cases):
    from benchmarks.common.torch_twin import Twin, to_ours, to_torch

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
            expected_y = to_ours(output)
            if (far := np.isinf(x)).any() and name in LIMITS:  # PyTorch has inf * 0
                y, expected_y = np.where(far, 0, y), np.where(far, 0, expected_y)
            # in norm layers sums of an infinity are infinite or NaN by their order
            case.compare(np.testing.assert_allclose, y, expected_y, rtol=1e-9, atol=1e-12)
            dx, expected = model.backward(dy.copy(), saved), to_ours(theirs.grad)
            if name in LIMITS:
                dx, expected = np.where(far, 0, dx), np.where(far, 0, expected)
            if name == "max pool":  # of several NaN, PyTorch's last wins, and our first
                windows = (3, 2, 2, 3, 2, 4)
                dx, expected = (a.reshape(windows).sum(axis=(2, 4)) for a in (dx, expected))
            if (
                name == "ReLU6"
            ):  # PyTorch's kernels stop the gradient at NaN, or not, by their place
                dx, expected = dx[~np.isnan(x)], expected[~np.isnan(x)]
            case.compare(np.testing.assert_allclose, dx, expected, rtol=1e-9, atol=1e-12)


F = torch.nn.functional
LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    # PyTorch divides the hinges by the number of classes
    "hinge": lambda y, t: F.multi_margin_loss(y, t) * y.shape[1],
}


@pytest.mark.fuzz("networks")
@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_losses_of_what_is_not_finite_are_those_of_pytorch(cases):
    backends = [create_backend("numpy"), create_backend("cpu", threads=1)]
    for case in cases:
        name, rng = [*LOSSES][case.number % len(LOSSES)], case.rng
        shape = tuple(int(n) for n in rng.integers(2, 20, size=2))
        y = draw(rng, shape, float(rng.choice([0.01, 0.2])))
        target = rng.integers(shape[1], size=shape[0])
        if name == "binary_cross_entropy":
            target = rng.choice([0.0, 0.3, 1.0], size=shape)
        elif name in ("mse", "mae"):
            target = draw(rng, shape, 0.05)
        theirs = torch.from_numpy(y.copy()).requires_grad_()
        loss = LOSSES[name](theirs, torch.from_numpy(target))
        loss.backward()
        for backend in backends:
            value, dy = get_loss(name)(backend, y.copy(), target, 1 / len(y))
            expected = loss.item()
            if name == "hinge":  # PyTorch leaves out what is NaN, which hides it; ours is NaN
                margins = y - y[np.arange(len(y)), target][:, None]
                margins[np.arange(len(y)), target] = 0
                expected = np.nan if np.isnan(margins).any() else expected
            if name == "binary_cross_entropy" and not np.isfinite([value, expected]).any():
                # of infinite logits infinity - infinity is taken, here and there for other targets
                expected = value / len(y)
            # sums of float64 in another order
            case.compare(np.testing.assert_allclose, value / len(y), expected, rtol=1e-12)
            expected = theirs.grad.numpy()
            if name == "mae":  # PyTorch's sign of NaN is 0, which hides it; ours is NaN
                expected = np.where(np.isnan(y - target), np.nan, expected)
            case.compare(np.testing.assert_allclose, dy, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_dropout_passes_what_is_not_finite_unless_it_drops_it(backend):
    """PyTorch multiplies by 0: there, what is dropped may be NaN."""
    rng, options = np.random.default_rng(0), {"dtype": "float64", "input_gradient": True}
    x, dy = (draw(rng, (5, 7, 3), 0.3) for _ in range(2))
    model = Model(layers.Dropout(0.4), x.shape[1:], backend=backend, **options)
    context = StepContext(training=True, seed=1, samples=np.arange(len(x)))
    mask = model.forward(np.ones_like(x), context)[0].copy()
    y, saved = model.forward(x.copy(), context)
    for given, passed in ((y, x), (model.backward(dy.copy(), saved), dy)):
        np.testing.assert_allclose(given, np.where(mask, passed, 0) * mask.max(), rtol=1e-12)
