"""Every layer computes what PyTorch's computes: outputs and all gradients in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import Layer, StepContext
from pydtnn.model import Model
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

IMAGE = (9, 11, 6)
VOLUME = (5, 7, 6, 4)
SIGNAL = (23, 6)
ATTENTION = [(3, (13, 45)), (2, (1, 6))]
"""Heads, and steps with features for queries, keys and values."""


IMAGES: list[Callable[[], Layer]] = [
    *(partial(layers.Conv2d, 5, 3, padding=1), partial(layers.Conv2d, 8, 1, stride=2)),
    partial(layers.Conv2d, 8, 3, stride=2, padding=1, bias=False),
    partial(layers.Conv2d, 4, (5, 2), stride=(3, 1)),
    partial(layers.Conv2d, 4, 4, padding=((1, 2), (0, 3))),
    partial(layers.Conv2d, 4, 4, padding="same"),
    partial(layers.Conv2d, 4, 3, dilation=2, padding=2),
    partial(layers.Conv2d, 9, 3, groups=3, padding=1),
    partial(layers.Conv2d, 6, 3, groups=6, padding=1),
    partial(layers.Conv2d, 12, 3, groups=6, stride=2),
    partial(layers.ConvTranspose2d, 5, 3),
    partial(layers.ConvTranspose2d, 5, (3, 4), stride=(3, 2), padding=1, output_padding=(2, 1)),
    partial(layers.ConvTranspose2d, 4, 3, stride=2, padding=((0, 2), (1, 0)), bias=False),
    partial(layers.ConvTranspose2d, 9, 3, dilation=2, padding=2, groups=3),
    *(partial(layers.Upsample, (2, 3)), partial(layers.Upsample, (3, 2), "bilinear")),
    *(layers.BatchNorm, layers.LayerNorm, partial(layers.LayerNorm, axes=3)),
    *(partial(layers.GroupNorm, 3), partial(layers.LocalResponseNorm, 3, alpha=0.5)),
    partial(layers.LocalResponseNorm, 4, alpha=2, beta=1.5, k=0.5),
    *(partial(layers.MaxPool2d, 2), partial(layers.MaxPool2d, 3, stride=2, padding=1)),
    partial(layers.MaxPool2d, 3, stride=2, padding=((0, 1), (2, 0))),
    partial(layers.AvgPool2d, 3, stride=2, padding=1),
    partial(layers.AvgPool2d, 3, stride=2, padding=1, count_padding=False),
    *(partial(layers.AdaptiveAvgPool2d, (4, 3)), layers.GlobalAvgPool2d),
    *(layers.ReLU, layers.ReLU6, partial(layers.LeakyReLU, 0.2), partial(layers.ELU, 1.5)),
    *(layers.Sigmoid, layers.Tanh, layers.ArcTan, layers.Log, layers.GELU, layers.SiLU),
    *(layers.HardSwish, layers.HardSigmoid, layers.Softplus, layers.Flatten, layers.Identity),
    *(partial(layers.Rescale, 1.2), partial(layers.Reshape, (3, -1, 6))),
    partial(layers.Pad, ((1, 0), (0, 2), (3, 1))),
    partial(layers.Slice, slice(1, None, 2), slice(None), slice(2, 5)),
    lambda: layers.Residual(layers.Conv2d(6, 3, padding=1)),
    lambda: layers.Branches(
        layers.Conv2d(3, 1), layers.Conv2d(2, 3, padding=1), merge=layers.Concat()
    ),
]
VOLUMES: list[Callable[[], Layer]] = [
    *(partial(layers.Linear, 7), partial(layers.Conv3d, 5, 3, padding=1)),
    partial(layers.Conv3d, 5, 2, padding="same"),
    partial(layers.Conv3d, 6, (2, 3, 2), stride=(1, 2, 2), dilation=(2, 1, 1), padding=1),
    partial(layers.Conv3d, 6, 3, groups=2, padding=(0, 1, 1)),
    *(layers.BatchNorm, partial(layers.LocalResponseNorm, 5, k=2), partial(layers.MaxPool3d, 2)),
    partial(layers.MaxPool3d, 3, stride=(1, 2, 2), padding=1),
    partial(layers.AvgPool3d, 3, stride=2, padding=1),
    partial(layers.AvgPool3d, (2, 3, 3), stride=2, padding=1, count_padding=False),
    *(layers.GlobalAvgPool3d, layers.Flatten),
]
SIGNALS: list[Callable[[], Layer]] = [
    partial(layers.Conv1d, 5, 5, padding=2),
    partial(layers.Conv1d, 7, 3, dilation=4, padding=((8, 0),)),
    partial(layers.Conv1d, 9, 4, stride=3, groups=3, padding="same", bias=False),
    partial(layers.Conv1d, 12, 7, groups=6, padding=3),
    *(partial(layers.MaxPool1d, 3, stride=2, padding=1), partial(layers.AvgPool1d, 4, padding=2)),
    partial(layers.AvgPool1d, 3, stride=2, padding=((0, 2),), count_padding=False),
    *(layers.GlobalAvgPool1d, layers.ClassToken, layers.PositionalEmbedding),
    *(partial(layers.DotProductAttention, 1), partial(layers.DotProductAttention, 2, causal=True)),
]
VECTORS: list[Callable[[], Layer]] = [
    *(partial(layers.Linear, 7), partial(layers.Linear, 7, bias=False), layers.Softmax),
    *(layers.LogSoftmax, partial(layers.BatchNorm, momentum=0.3)),
]
CASES = [
    *((make, IMAGE) for make in IMAGES),
    *((make, VOLUME) for make in VOLUMES),
    *((make, SIGNAL) for make in SIGNALS),
    *((make, (13,)) for make in VECTORS),
    *((partial(layers.DotProductAttention, heads), shape) for heads, shape in ATTENTION),
    (partial(layers.DotProductAttention, 3, window=4, scale=0.3), ATTENTION[0][1]),
    (partial(layers.DotProductAttention, 3, window=4, causal=True), ATTENTION[0][1]),
]


def assert_close(ours: Array, theirs: np.ndarray, what: str) -> None:
    """Compare in norm: both sides sum in their own order, in float64."""
    ours = to_host(ours)
    scale = max(float(np.abs(theirs).max(initial=0)), 1e-30)
    assert float(np.abs(ours - theirs).max(initial=0)) <= 1e-10 * scale, what


@each(("make", "shape"), CASES)
def test_a_layer_equals_pytorch(make, shape, backend):
    from benchmarks.common.torch_twin import Twin, to_ours, to_torch

    rng = np.random.default_rng(0)
    model = Model(make(), shape, backend=backend, dtype="float64", input_gradient=True)
    for p in model.parameters.values():
        p.master[...] = backend.asarray(rng.normal(size=p.shape))
    twin = Twin(model)
    x = rng.uniform(0.1, 2, (4, *shape)) if make is layers.Log else 3 * rng.normal(size=(4, *shape))
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


def test_attention_to_a_second_sequence_equals_pytorch_and_without_a_twin_is_refused():
    from benchmarks.common.torch_twin import convert, to_ours, to_torch

    rng, net = np.random.default_rng(0), layers.CrossAttention(2, window=3, name="a")
    model = Model(net, [(5, 6), (4, 12)], dtype="float64")
    q, kv = rng.normal(size=(3, 5, 6)), rng.normal(size=(3, 4, 12))
    theirs = to_ours(convert(model.layers["a"])(to_torch(q), to_torch(kv)))
    assert_close(model.predict((q, kv)), theirs, "output")
    for options, shapes in (({"positions": layers.LinearBiases()}, (4, 6)), ({}, [(4, 6), (1,)])):
        model = Model(layers.DotProductAttention(2, name="a", **options), shapes)
        with pytest.raises(ValueError, match="a: attention with positions, lengths or documents"):
            convert(model.layers["a"])


def test_running_statistics_equal_pytorch(backend):
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
