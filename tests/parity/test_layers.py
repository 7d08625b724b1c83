"""Every layer computes what PyTorch's computes: outputs and all gradients in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import Layer, StepContext
from pydtnn.model import Model
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

IMAGE = (9, 11, 6)
VOLUME = (5, 7, 6, 4)
SIGNAL = (23, 6)
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: layers.Linear(7), (13,)),
    "linear without bias": (lambda: layers.Linear(7, bias=False), (13,)),
    "linear of volumes": (lambda: layers.Linear(7), VOLUME),
    "conv 3x3": (lambda: layers.Conv2d(5, 3, padding=1), IMAGE),
    "conv 3x3 stride 2": (lambda: layers.Conv2d(8, 3, stride=2, padding=1, bias=False), IMAGE),
    "conv 1x1 stride 2": (lambda: layers.Conv2d(8, 1, stride=2), IMAGE),
    "conv 5x2 stride 3x1": (lambda: layers.Conv2d(4, (5, 2), stride=(3, 1)), IMAGE),
    "conv asymmetric padding": (lambda: layers.Conv2d(4, 4, padding=((1, 2), (0, 3))), IMAGE),
    "conv same, even kernel": (lambda: layers.Conv2d(4, 4, padding="same"), IMAGE),
    "conv dilated": (lambda: layers.Conv2d(4, 3, dilation=2, padding=2), IMAGE),
    "conv groups": (lambda: layers.Conv2d(9, 3, groups=3, padding=1), IMAGE),
    "conv depthwise": (lambda: layers.Conv2d(6, 3, groups=6, padding=1), IMAGE),
    "conv depthwise, multiplier 2": (lambda: layers.Conv2d(12, 3, groups=6, stride=2), IMAGE),
    "transposed conv": (lambda: layers.ConvTranspose2d(5, 3), IMAGE),
    "transposed conv, stride and output padding": (
        lambda: layers.ConvTranspose2d(5, (3, 4), stride=(3, 2), padding=1, output_padding=(2, 1)),
        IMAGE,
    ),
    "transposed conv, asymmetric padding": (
        lambda: layers.ConvTranspose2d(4, 3, stride=2, padding=((0, 2), (1, 0)), bias=False),
        IMAGE,
    ),
    "transposed conv, dilated groups": (
        lambda: layers.ConvTranspose2d(9, 3, dilation=2, padding=2, groups=3),
        IMAGE,
    ),
    "nearest": (lambda: layers.Upsample((2, 3)), IMAGE),
    "bilinear": (lambda: layers.Upsample((3, 2), "bilinear"), IMAGE),
    "conv of signals": (lambda: layers.Conv1d(5, 5, padding=2), SIGNAL),
    "conv of signals, causal": (lambda: layers.Conv1d(7, 3, dilation=4, padding=((8, 0),)), SIGNAL),
    "conv of signals, stride and groups": (
        lambda: layers.Conv1d(9, 4, stride=3, groups=3, padding="same", bias=False),
        SIGNAL,
    ),
    "conv of signals, depthwise": (lambda: layers.Conv1d(12, 7, groups=6, padding=3), SIGNAL),
    "conv of volumes": (lambda: layers.Conv3d(5, 3, padding=1), VOLUME),
    "conv of volumes, even kernel": (lambda: layers.Conv3d(5, 2, padding="same"), VOLUME),
    "conv of volumes, stride and dilation": (
        lambda: layers.Conv3d(6, (2, 3, 2), stride=(1, 2, 2), dilation=(2, 1, 1), padding=1),
        VOLUME,
    ),
    "conv of volumes, groups": (lambda: layers.Conv3d(6, 3, groups=2, padding=(0, 1, 1)), VOLUME),
    "batch norm of images": (lambda: layers.BatchNorm(), IMAGE),
    "batch norm of vectors": (lambda: layers.BatchNorm(momentum=0.3), (13,)),
    "batch norm of volumes": (lambda: layers.BatchNorm(), VOLUME),
    "layer norm": (lambda: layers.LayerNorm(), IMAGE),
    "layer norm over three axes": (lambda: layers.LayerNorm(axes=3), IMAGE),
    "group norm": (lambda: layers.GroupNorm(3), IMAGE),
    "local response norm": (lambda: layers.LocalResponseNorm(3, alpha=0.5), IMAGE),
    "local response norm, even size": (
        lambda: layers.LocalResponseNorm(4, alpha=2, beta=1.5, k=0.5),
        IMAGE,
    ),
    "local response norm of volumes": (lambda: layers.LocalResponseNorm(5, k=2), VOLUME),
    "max pool": (lambda: layers.MaxPool2d(2), IMAGE),
    "max pool overlapping": (lambda: layers.MaxPool2d(3, stride=2, padding=1), IMAGE),
    "max pool asymmetric": (lambda: layers.MaxPool2d(3, stride=2, padding=((0, 1), (2, 0))), IMAGE),
    "max pool of signals": (lambda: layers.MaxPool1d(3, stride=2, padding=1), SIGNAL),
    "average pool of signals": (lambda: layers.AvgPool1d(4, padding=2), SIGNAL),
    "average pool of signals without padding": (
        lambda: layers.AvgPool1d(3, stride=2, padding=((0, 2),), count_padding=False),
        SIGNAL,
    ),
    "global pool of signals": (lambda: layers.GlobalAvgPool1d(), SIGNAL),
    "max pool of volumes": (lambda: layers.MaxPool3d(2), VOLUME),
    "max pool of volumes, overlapping": (
        lambda: layers.MaxPool3d(3, stride=(1, 2, 2), padding=1),
        VOLUME,
    ),
    "average pool": (lambda: layers.AvgPool2d(3, stride=2, padding=1), IMAGE),
    "average pool without padding": (
        lambda: layers.AvgPool2d(3, stride=2, padding=1, count_padding=False),
        IMAGE,
    ),
    "adaptive pool": (lambda: layers.AdaptiveAvgPool2d((4, 3)), IMAGE),
    "global pool": (lambda: layers.GlobalAvgPool2d(), IMAGE),
    "average pool of volumes": (lambda: layers.AvgPool3d(3, stride=2, padding=1), VOLUME),
    "average pool of volumes without padding": (
        lambda: layers.AvgPool3d((2, 3, 3), stride=2, padding=1, count_padding=False),
        VOLUME,
    ),
    "global pool of volumes": (lambda: layers.GlobalAvgPool3d(), VOLUME),
    "relu": (lambda: layers.ReLU(), IMAGE),
    "relu6": (lambda: layers.ReLU6(), IMAGE),
    "leaky relu": (lambda: layers.LeakyReLU(0.2), IMAGE),
    "elu": (lambda: layers.ELU(1.5), IMAGE),
    "sigmoid": (lambda: layers.Sigmoid(), IMAGE),
    "tanh": (lambda: layers.Tanh(), IMAGE),
    "arctan": (lambda: layers.ArcTan(), IMAGE),
    "log": (lambda: layers.Log(), IMAGE),
    "gelu": (lambda: layers.GELU(), IMAGE),
    "silu": (lambda: layers.SiLU(), IMAGE),
    "hard_swish": (lambda: layers.HardSwish(), IMAGE),
    "hard_sigmoid": (lambda: layers.HardSigmoid(), IMAGE),
    "softmax": (lambda: layers.Softmax(), (13,)),
    "log softmax": (lambda: layers.LogSoftmax(), (13,)),
    "softplus": (lambda: layers.Softplus(), IMAGE),
    "attention": (lambda: layers.DotProductAttention(3), (13, 45)),
    "causal attention": (lambda: layers.DotProductAttention(2, causal=True), (7, 6)),
    "attention to oneself": (lambda: layers.DotProductAttention(2), (1, 6)),
    "class token": (lambda: layers.ClassToken(), (13, 5)),
    "positional embedding": (lambda: layers.PositionalEmbedding(), (13, 5)),
    "flatten": (lambda: layers.Flatten(), IMAGE),
    "flatten volumes": (lambda: layers.Flatten(), VOLUME),
    "rescale": (lambda: layers.Rescale(1.2), IMAGE),
    "reshape": (lambda: layers.Reshape((3, -1, 6)), IMAGE),
    "pad": (lambda: layers.Pad(((1, 0), (0, 2), (3, 1))), IMAGE),
    "slice": (lambda: layers.Slice(slice(1, None, 2), slice(None), slice(2, 5)), IMAGE),
    "identity": (lambda: layers.Identity(), IMAGE),
    "residual": (lambda: layers.Residual(layers.Conv2d(6, 3, padding=1)), IMAGE),
    "branches": (
        lambda: layers.Branches(
            layers.Conv2d(3, 1), layers.Conv2d(2, 3, padding=1), merge=layers.Concat()
        ),
        IMAGE,
    ),
}


def assert_close(ours: Array, theirs: np.ndarray, what: str) -> None:
    """Compare in norm: both sides sum in their own order, in float64."""
    ours = to_host(ours)
    scale = max(float(np.abs(theirs).max(initial=0)), 1e-30)
    assert float(np.abs(ours - theirs).max(initial=0)) <= 1e-10 * scale, what


@each("case", CASES)
def test_a_layer_equals_pytorch(case: str, backend: Backend) -> None:
    from benchmarks.common.torch_twin import Twin, to_ours, to_torch

    make, shape = CASES[case]
    net: Layer = make()
    rng = np.random.default_rng(0)
    model = Model(net, shape, backend=backend, dtype="float64", input_gradient=True)
    for p in model.parameters.values():
        p.master[...] = backend.asarray(rng.normal(size=p.shape))
    twin = Twin(model)
    x = rng.uniform(0.1, 2, (4, *shape)) if case == "log" else 3 * rng.normal(size=(4, *shape))
    dy = rng.normal(size=(4, *model.output_shape))

    theirs = to_torch(x.copy()).requires_grad_()
    output = twin(theirs)
    output.backward(to_torch(dy))
    y, residuals = model.forward(backend.asarray(x), StepContext(training=True))
    assert_close(y, to_ours(output), "output")
    dx = model.backward(backend.asarray(dy), residuals)
    assert_close(dx, to_ours(theirs.grad), "dx")
    for name, gradient in (twin.gradients() if model.parameters else {}).items():
        assert_close(model.parameters[name].grad, gradient, name)


def test_running_statistics_equal_pytorch(backend: Backend) -> None:
    from benchmarks.common.torch_twin import Twin, to_ours, to_torch

    rng = np.random.default_rng(0)
    model = Model(layers.BatchNorm(momentum=0.2), IMAGE, backend=backend, dtype="float64")
    twin = Twin(model)
    for _ in range(3):
        x = 2 + rng.normal(size=(4, *IMAGE))
        twin(to_torch(x))
        model.forward(backend.asarray(x), StepContext(training=True))
        model.statistics.fold()
    norm = twin.steps[0]
    (ours,) = model.statistics.statistics
    assert_close(ours.mean, norm.running_mean.numpy(), "mean")
    assert_close(ours.variance, norm.running_var.numpy(), "variance")
    twin.eval()
    y, _ = model.forward(backend.asarray(x), StepContext(training=False))
    assert_close(y, to_ours(twin(to_torch(x))), "evaluation")
