"""Every layer keeps the contract of layers, at awkward sizes, on every backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn import layers as nn
from pydtnn.model import Model
from pydtnn.tools.testing import check_layer
from tests.each import each

TWICE = [(3, 2)] * 2
Q_K_V = [(5, 16), (5, 8), (5, 8)]

LAYERS: dict[str, list[tuple[Any, Any]]] = {
    "activations": [
        *((kind(), (7,)) for kind in (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Sigmoid)),
        *((kind(), (3, 3, 2)) for kind in (nn.ReLU, nn.ELU, nn.SiLU, nn.Tanh, nn.GELU, nn.ArcTan)),
        *((kind(), (7,)) for kind in (nn.HardSigmoid, nn.HardSwish, nn.Softplus, nn.SiLU)),
        *((nn.LeakyReLU(1.5), (7,)), (nn.ELU(0.3), (7,)), (nn.GELU("none"), (3, 3, 2))),
        *((nn.Softmax(), (7,)), (nn.Softmax(), (2, 3)), (nn.LogSoftmax(), (7,))),
        *((nn.LogSoftmax(), (2, 3)), (nn.Log(), (5, 2))),
    ],
    "attention": [
        *((nn.DotProductAttention(1), (1, 3)), (nn.DotProductAttention(1), (5, 9))),
        *((nn.DotProductAttention(2, causal=True), (7, 6)), (nn.DotProductAttention(3), (4, 18))),
        *((nn.DotProductAttention(2, dropout=0.3), (60, 30)), (nn.Rotary(1), [(1, 2)] * 3)),
        (nn.DotProductAttention(2, causal=True, dropout=0.3), (5, 12)),
        (nn.DotProductAttention(2, window=3, positions=nn.LinearBiases(), scale=0.7), (7, 12)),
        (nn.DotProductAttention(3, causal=True, positions=nn.RelativePositions(4, 6)), (9, 18)),
        (nn.CrossAttention(2, dropout=0.2), [(3, 8), (5, 16)]),
        (nn.CrossAttention(1, positions=nn.RelativePositions(6, 8)), [(5, 4), (3, 8)]),
        *((nn.Rotary(4), Q_K_V), (nn.Rotary(6), [(3, 12), (3, 2), (3, 2)])),
    ],
    "convolutions": [
        (nn.Conv2d(3, 1), (4, 3, 2)),
        (nn.Conv2d(3, 1, stride=2), (5, 4, 2)),
        (nn.Conv2d(2, 3, padding="same"), (4, 5, 3)),
        (nn.Conv2d(2, (4, 2), padding="same", stride=(2, 3)), (5, 7, 2)),
        (nn.Conv2d(2, 3, padding=((2, 0), (1, 2))), (4, 4, 2)),
        (nn.Conv2d(2, (1, 3), padding=(0, 1)), (1, 5, 1)),
        (nn.Conv2d(2, 2, stride=3), (6, 7, 2)),  # rows that no window reaches
        (nn.Conv2d(2, 3, dilation=(2, 1), padding=2), (5, 4, 2)),
        (nn.Conv2d(4, 3, groups=2, padding=1), (4, 4, 6)),
        (nn.Conv2d(3, 3, groups=3, bias=False), (5, 4, 3)),
        (nn.Conv2d(6, 2, groups=3, stride=2), (4, 4, 3)),
        (nn.Conv2d(2, (3, 4)), (3, 4, 2)),  # as large as the image
    ],
    "dropout": [(nn.Dropout(rate), (3, 5)) for rate in (0.0, 0.3, 0.9)],
    "enlarging": [
        (nn.ConvTranspose2d(3, 1), (3, 2, 2)),
        (nn.ConvTranspose2d(3, (3, 4), stride=(3, 2), padding=1, output_padding=(2, 1)), (2, 3, 2)),
        (nn.ConvTranspose2d(2, 3, padding=((0, 2), (1, 0))), (3, 3, 2)),
        (nn.ConvTranspose2d(2, 2, dilation=(2, 3), bias=False), (2, 3, 2)),
        (nn.ConvTranspose2d(6, 3, stride=2, groups=2, padding=1), (2, 3, 4)),
        (nn.ConvTranspose2d(3, 2, stride=2, groups=3), (2, 3, 3)),
        (nn.ConvTranspose2d(2, 1, stride=3), (2, 3, 2)),
        (nn.ConvTranspose2d(2, 4), (1, 1, 3)),
        *((nn.Upsample(2), (2, 3, 3)), (nn.Upsample((1, 3)), (2, 1, 2))),
        *((nn.Upsample(2, "bilinear"), (2, 3, 3)), (nn.Upsample((3, 4), "bilinear"), (3, 2, 2))),
        (nn.Upsample((2, 5), "bilinear"), (1, 1, 1)),
        (nn.Upsample((2, 1), "bilinear"), (3, 2, 2)),
    ],
    "experts": [
        (nn.Experts(3, choices=2, capacity=0.75), [(1, 1), (1, 3)]),
        (nn.Experts(3, choices=1, capacity=1.0), [(5, 4), (5, 3)]),
        (nn.Experts(3, choices=2, gated=True), [(3, 2), (3, 2)]),
    ],
    "linear": [
        *((nn.Linear(4), (1,)), (nn.Linear(4), (5,)), (nn.Linear(4), (2, 1, 3))),
        *((nn.Linear(4, bias=False), (5,)), (nn.Linear(4, bias=False), (2, 3))),
    ],
    "merges": [
        *((nn.Add(), TWICE), (nn.Add(), [(3, 2)] * 4), (nn.Multiply(), TWICE)),
        *((nn.Multiply(), [(3, 2, 4), (1, 1, 4)]), (nn.Multiply(), [(3, 2, 4), (3, 1, 1)])),
        *((nn.Concat(), [(2, 3, 1), (2, 3, 4)]), (nn.Concat(0), [(2, 3), (1, 3), (3, 3)])),
        *((nn.Concat(1), [(2, 3, 2), (2, 1, 2)]), (nn.Concat(-2), [(2, 3, 2), (2, 1, 2)])),
        (nn.Concat(), (4,)),
    ],
    "moving": [
        *((nn.Identity(), (3, 2)), (nn.Flatten(), (3, 2, 2)), (nn.Flatten(), (5,))),
        *((nn.Reshape((2, 6)), (3, 4)), (nn.Reshape([2, -1]), (3, 4)), (nn.Rescale(-1.5), (3, 2))),
        *((nn.Transpose((2, 0, 1)), (3, 4, 2)), (nn.Pad(((1, 2), (0, 0), (0, 3))), (2, 3, 2))),
        *((nn.Pad(((0, 0),)), (4,)), (nn.Slice(slice(None, None, 2), slice(1, 3)), (5, 4, 2))),
        *((nn.Slice(slice(-2, None)), (5, 2)), (nn.Slice(), (3, 2))),
    ],
    "norms": [
        *(
            (nn.BatchNorm(), (2, 3, 4)),
            (nn.BatchNorm(epsilon=1e-3), (5,)),
            (nn.BatchNorm(), (3, 1)),
        ),
        *((nn.GroupNorm(2), (2, 3, 6)), (nn.GroupNorm(1), (2, 2, 3)), (nn.GroupNorm(3), (2, 3, 3))),
        *((nn.GroupNorm(2), (6,)), (nn.LayerNorm(), (2, 5)), (nn.LayerNorm(axes=3), (2, 3, 2))),
        *((nn.LayerNorm(axes=2, epsilon=1e-2), (2, 3, 4)), (nn.RMSNorm(), (7,))),
        *((nn.RMSNorm(epsilon=1e-2), (2, 5)), (nn.LocalResponseNorm(3, alpha=0.7), (2, 3, 5))),
        (nn.LocalResponseNorm(4, alpha=2.0, k=0.5), (3, 2)),
        (nn.LocalResponseNorm(2, beta=1.5), (6,)),
    ],
    "pools": [
        *((nn.MaxPool2d(2), (4, 6, 3)), (nn.MaxPool2d(2), (5, 3, 2))),
        (nn.MaxPool2d(3, stride=(1, 2), padding=1), (4, 5, 2)),
        (nn.MaxPool2d((3, 2), padding=((2, 0), (0, 1))), (4, 5, 2)),
        (nn.MaxPool2d(3, stride=2, padding="same"), (4, 5, 2)),
        *((nn.MaxPool2d(1, stride=2), (4, 5, 2)), (nn.AvgPool2d(2), (4, 6, 3))),
        (nn.AvgPool2d((3, 2), stride=1, padding=1), (4, 3, 2)),
        (nn.AvgPool2d(3, stride=2, padding=((1, 2), (0, 1)), count_padding=False), (5, 4, 2)),
        *((nn.AdaptiveAvgPool2d((2, 3)), (5, 7, 2)), (nn.AdaptiveAvgPool2d((3, 2)), (3, 2, 2))),
        (nn.AdaptiveAvgPool2d(3), (5, 4, 1)),  # overlapping bins
        *((nn.GlobalAvgPool2d(), (3, 5, 4)), (nn.GlobalAvgPool2d(), (1, 1, 2))),
    ],
    "recurrent": [
        (kind(2, **options), (2, 3))
        for kind in (nn.LSTMLayer, nn.GRULayer)
        for options in (
            {"reverse": True},
            {"return_sequences": False},
            {"return_sequences": False, "reverse": True, "bias": False},
            {"return_states": True},
        )
    ]
    + [
        (kind(2, **options), [(2, 3), *[(2,)] * kind.carried])
        for kind in (nn.LSTMLayer, nn.GRULayer)
        for options in (
            {"return_sequences": False},
            {"return_states": True, "reverse": True},
            {"return_states": True, "return_sequences": False},
        )
    ],
    "sequences": [
        *((nn.ClassToken(), (1, 1)), (nn.ClassToken(), (7, 3))),
        *((nn.PositionalEmbedding(), (1, 5)), (nn.PositionalEmbedding(), (4, 33))),
    ],
    "signals": [
        *((nn.Conv1d(3, 1), (5, 2)), (nn.Conv1d(3, 3, padding=1), (1, 2))),
        (nn.Conv1d(2, 4, padding="same"), (7, 3)),
        (nn.Conv1d(5, 3, stride=2, padding=((2, 1),)), (11, 3)),
        (nn.Conv1d(2, 3, dilation=3, padding=((6, 0),), bias=False), (7, 1)),  # causal
        *((nn.Conv1d(6, 3, groups=2, padding=1), (5, 4)), (nn.MaxPool1d(2), (5, 3))),
        *((nn.MaxPool1d(3, stride=1, padding=1), (5, 2)), (nn.GlobalAvgPool1d(), (7, 3))),
        (nn.AvgPool1d(3, stride=2, padding=1), (7, 5)),
        (nn.AvgPool1d(4, stride=3, padding=((1, 2),), count_padding=False), (9, 3)),
    ],
    "volumes": [
        *((nn.Conv3d(3, 1), (2, 3, 2, 2)), (nn.Conv3d(2, 2, padding="same"), (3, 2, 4, 2))),
        (nn.Conv3d(2, (2, 3, 1), stride=(1, 2, 3), padding=((1, 0), (0, 2), (0, 0))), (3, 4, 5, 2)),
        (nn.Conv3d(2, 2, dilation=(2, 1, 2), bias=False), (3, 2, 3, 1)),
        (nn.Conv3d(4, (3, 1, 2), groups=2, padding=(1, 0, 1)), (2, 3, 2, 4)),
        *((nn.Conv3d(3, 2, groups=3), (3, 2, 2, 3)), (nn.MaxPool3d(2), (4, 3, 2, 3))),
        (nn.MaxPool3d((2, 3, 1), stride=1, padding=(1, 1, 0)), (3, 4, 2, 2)),
        (nn.AvgPool3d(2, stride=(1, 2, 1)), (3, 4, 2, 2)),
        (nn.AvgPool3d(2, padding=((1, 0), (0, 1), (1, 1)), count_padding=False), (3, 3, 2, 2)),
        (nn.GlobalAvgPool3d(), (2, 3, 2, 4)),
    ],
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_keep_the_contract(kind, backend):
    for layer, shapes in LAYERS[kind]:
        given = shapes if isinstance(shapes, list) else [shapes]
        options = {"batch": 4 if kind == "norms" else 2, "positive": isinstance(layer, nn.Log)}
        check_layer(copy.deepcopy(layer), *given, backend=backend, **options)


SHAPE, PAD = (5, 4, 3), ((1, 0), (0, 2), (0, 0))
FORMULAS: list[tuple[Any, list[tuple[int, ...]], Callable[..., Any]]] = [
    (nn.Flatten(), [SHAPE], lambda x: x.reshape(2, -1)),
    (nn.Reshape((-1, 2)), [SHAPE], lambda x: x.reshape(2, 30, 2)),
    (nn.Slice(slice(None, None, 2), slice(1, None)), [SHAPE], lambda x: x[:, ::2, 1:]),
    (nn.Transpose((2, 0, 1)), [SHAPE], lambda x: x.transpose(0, 3, 1, 2)),
    (nn.Pad(PAD), [SHAPE], lambda x: np.pad(x, ((0, 0), *PAD))),
    (nn.Add(), [SHAPE] * 3, lambda x, y, z: x + y + z),
    (nn.Multiply(), [SHAPE, (1, 1, 3)], lambda x, y: x * y),
    (nn.Concat(0), [SHAPE] * 2, lambda x, y: np.concatenate([x, y], axis=1)),
    (nn.GlobalAvgPool2d(), [SHAPE], lambda x: x.mean(axis=(1, 2))),
    (
        nn.ClassToken(initializer="ones"),
        [(5, 4)],
        lambda x: np.concatenate([np.ones((2, 1, 4)), x], axis=1),
    ),
    (nn.PositionalEmbedding(initializer="ones"), [(5, 4)], lambda x: x + 1),
    (
        nn.Linear(2, initializer="ones", bias_initializer="ones"),
        [(5, 4)],
        lambda x: x @ np.ones((4, 2)) + 1,
    ),
]


@each(("layer", "shapes", "formula"), FORMULAS)
def test_layers_compute_what_numpy_does(layer, shapes, formula, backend):
    xs = tuple(np.random.default_rng(i).normal(size=(2, *shape)) for i, shape in enumerate(shapes))
    model = Model(copy.deepcopy(layer), shapes, backend=backend, dtype="float64")
    found = model.predict(xs if len(xs) > 1 else xs[0])
    np.testing.assert_allclose(found, formula(*xs), rtol=1e-12, atol=1e-14)


@each(
    ("layer", "decay"),
    [
        *((one, [True, False]) for one in (nn.Linear(2), nn.Conv1d(2, 1))),
        *((norm, [False] * 2) for norm in (nn.BatchNorm(), nn.GroupNorm(1), nn.LayerNorm())),
        *((one, [False]) for one in (nn.RMSNorm(), nn.ClassToken(), nn.PositionalEmbedding())),
    ],
)
def test_weight_decay_leaves_out_biases_norms_and_embeddings(layer, decay):
    model = Model(copy.deepcopy(layer), (3, 4), backend="numpy")
    assert [p.decay for p in model.parameters.values()] == decay
