"""The same network in PyTorch, built from a graph of pydtnn layers.

Benchmarks time it as the peer: idiomatic `torch.nn` modules, `channels_last`, in-place ReLU. With a
model's weights it is the twin that parity tests hold the library to.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from pydtnn import layers
from pydtnn.kernels import create_backend
from pydtnn.layers import Layer
from pydtnn.layers.blocks import nodes
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.masks import positions_seen
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.models import create_net

Convert = Callable[[Any], nn.Module]

MAPS = (4, 5)
"""Axes of batches of images and of volumes, whose channels are the second axis in PyTorch."""


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return self.function(*xs)


class Peer(nn.Module):
    """A `torch.nn.Module` that computes what a graph of pydtnn layers computes.

    Parameters
    ----------
    graph : Graph
        Fused layers become the layers that they stand for. Inputs stay NHWC arrays, seen by PyTorch
        as NCHW in `channels_last` memory.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        inner = graph.nodes[len(graph.inputs) :]
        made: dict[Layer, nn.Module] = {}
        for node in inner:
            source = node.layer.source
            tied = isinstance(node.layer, layers.Embedding) and node.layer.gives_logits
            made[node.layer] = Embedding(node.layer, made[source]) if tied else convert(node.layer)
        self.steps = nn.ModuleList(made.values())
        self.wiring = [(n.index, [i.index for i in n.inputs], n.releases) for n in inner]
        self.outputs = [node.index for node in graph.outputs]
        self.to(getattr(torch, graph.dtype.name))
        volumes = any(p.ndim == 5 for p in self.parameters())
        self.to(memory_format=torch.channels_last_3d if volumes else torch.channels_last)

    def forward(self, *xs: torch.Tensor) -> Any:
        """Run the nodes in order; each x is (N, C, H, W), (N, C, D, H, W) or (N, features)."""
        values: list[Any] = [*xs, *[None] * len(self.wiring)]
        for step, (index, inputs, releases) in zip(self.steps, self.wiring, strict=True):
            values[index] = step(*(values[i] for i in inputs))
            for released in releases:
                values[released] = None
        ys = tuple(values[i] for i in self.outputs)
        return ys if len(ys) > 1 else ys[0]


class Twin(Peer):
    """The peer of a model, with the same weights.

    Parameters
    ----------
    model : Model
        Its weights are copied.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model.graph)
        self.layers = model.layers
        for layer, module in zip(self.layers, self.steps, strict=True):
            copy_weights(layer, module)

    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients by the names and in the shapes of the pydtnn model."""
        result = {}
        for layer, module in zip(self.layers, self.steps, strict=True):
            for p, tensor in pairs(layer, module):
                result[p.name] = channels_last(layer, tensor.grad).numpy().reshape(p.shape)
        return result


def plain_graph(name: str, classes: int, shape: tuple[int, ...]) -> Graph:
    """Wire a named net in float32, without fusion and without memory for its parameters."""
    graph = Graph((shape,), backend=create_backend("numpy"), dtype="float32")
    graph.finish(nodes(graph.add(create_net(name, classes, shape), *graph.inputs)))
    return graph


def to_torch(x: np.ndarray) -> torch.Tensor:
    """View an NHWC or NDHWC array as a tensor with the channels second; others stay as they are."""
    t = torch.from_numpy(x)
    return t.movedim(-1, 1) if t.ndim in MAPS else t


def to_ours(t: torch.Tensor) -> np.ndarray:
    """View such a tensor as an array with the channels last; others stay as they are."""
    t = t.detach()
    return (t.movedim(1, -1) if t.ndim in MAPS else t).numpy()


def pairs(layer: Layer, module: nn.Module) -> list[tuple[Any, torch.Tensor]]:
    """Match a layer's parameters with its module's: both come as weight, then bias."""
    if layer.source is not None:
        return []  # those of its first use
    inner = getattr(module, "inner", module)
    return list(zip(layer.parameters, inner.parameters(), strict=True))


def copy_weights(layer: Layer, module: nn.Module) -> None:
    """Copy a layer's parameters into its module."""
    with torch.no_grad():
        for p, tensor in pairs(layer, module):
            view = channels_last(layer, tensor)
            view.copy_(torch.from_numpy(layer.backend.to_numpy(p.master)).reshape(view.shape))


def channels_last(layer: Layer, tensor: torch.Tensor) -> torch.Tensor:
    """View a parameter, or its gradient, with the input channels of filters last."""
    filters = tensor.ndim in MAPS or (isinstance(layer, layers.Conv1d) and tensor.ndim == 3)
    return tensor.movedim(1, -1) if filters else tensor


class Padded(nn.Module):
    """A module with windows after explicit padding: PyTorch's own padding is symmetric only."""

    def __init__(self, inner: nn.Module, padding: tuple, value: float) -> None:
        super().__init__()
        self.inner = inner
        self.padding = [n for pair in reversed(padding) for n in pair]
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.pad(x, self.padding, value=self.value))


def windowed(make: Callable[..., nn.Module], padding: tuple, value: float) -> nn.Module:
    """Use PyTorch's own padding where it is symmetric, explicit padding otherwise."""
    if all(before == after for before, after in padding):
        return make(padding=tuple(before for before, _ in padding))
    return Padded(make(padding=0), padding, value)


def conv(layer: layers.Conv1d | layers.Conv2d | layers.Conv3d) -> nn.Module:
    g = layer.geometry
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[layer.axes - 1]
    module = windowed(
        lambda padding: kind(
            g.channels, g.filters, g.kernel, g.stride, padding, g.dilation, g.groups, layer.bias
        ),
        g.padding,
        0.0,
    )
    if layer.axes == 1:
        return ChannelsSecond(module)
    relu = isinstance(layer, FusedConv2d) and layer.relu
    return nn.Sequential(module, nn.ReLU()) if relu else module


def conv_transpose(layer: layers.ConvTranspose2d) -> nn.Module:
    g = layer.geometry
    same = all(before == after for before, after in g.padding)
    module = nn.ConvTranspose2d(
        *(g.filters, g.channels, g.kernel, g.stride),
        padding=tuple(before for before, _ in g.padding) if same else 0,
        output_padding=layer.output_padding,
        groups=g.groups,
        bias=layer.bias,
        dilation=g.dilation,
    )
    if same:
        return module
    (top, bottom), (left, right) = g.padding
    crop = Apply(lambda y: y[..., top : y.shape[2] - bottom, left : y.shape[3] - right])
    return nn.Sequential(module, crop)


def upsample(layer: layers.Upsample) -> nn.Module:
    corners = {"align_corners": False} if layer.mode == "bilinear" else {}
    return nn.Upsample(scale_factor=layer.factor, mode=layer.mode, **corners)


class ChannelsSecond(nn.Module):
    """A module on (N, L, C) arrays that wants (N, C, L)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.movedim(-1, 1)).movedim(1, -1)


def per_channel(layer: Layer, module: nn.Module) -> nn.Module:
    """Let a module that normalises channels see them as the second axis."""
    return ChannelsSecond(module) if len(layer.output_shape) == 2 else module


def batch_norm(layer: layers.BatchNorm) -> nn.Module:
    kind = {4: nn.BatchNorm3d, 3: nn.BatchNorm2d}.get(len(layer.output_shape), nn.BatchNorm1d)
    norm = kind(layer.output_shape[-1], eps=layer.epsilon, momentum=layer.momentum)
    return per_channel(layer, norm)


def group_norm(layer: layers.GroupNorm) -> nn.Module:
    return per_channel(layer, nn.GroupNorm(layer.groups, layer.output_shape[-1], layer.epsilon))


def is_small(g: Any) -> bool:
    """Whether PyTorch's own padding, at most half the window, is enough."""
    return all(2 * max(p) <= k for p, k in zip(g.padding, g.kernel, strict=True))


def max_pool(layer: layers.MaxPool1d | layers.MaxPool2d | layers.MaxPool3d) -> nn.Module:
    g = layer.geometry
    kind = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[layer.axes - 1]
    if not is_small(g):
        return Padded(kind(g.kernel, g.stride), g.padding, -torch.inf)
    return windowed(lambda padding: kind(g.kernel, g.stride, padding), g.padding, -torch.inf)


def average_pool(layer: layers.AvgPool1d | layers.AvgPool2d | layers.AvgPool3d) -> nn.Module:
    g = layer.geometry
    kind = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[layer.axes - 1]
    if is_small(g) and all(before == after for before, after in g.padding):
        padding = tuple(before for before, _ in g.padding)
        return kind(g.kernel, g.stride, padding, count_include_pad=layer.count_padding)
    mean = Padded(kind(g.kernel, g.stride), g.padding, 0.0)
    if layer.count_padding:
        return mean
    return Apply(lambda x: mean(x) / mean(torch.ones_like(x)))


class WrittenOut(nn.Module):
    """What our fused layer stands for, written out."""

    def __init__(self, layer: NormAddReLU) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            batch_norm(norm) if norm else nn.Identity() for norm in layer.norms
        )
        bounded = nn.ReLU() if layer.limit == inf else nn.Hardtanh(0.0, layer.limit)
        self.relu = bounded if layer.relu else nn.Identity()

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        values = [norm(x) for norm, x in zip(self.norms, xs, strict=True)]
        return self.relu(sum(values[1:], values[0]))


class ChannelsLast(nn.Module):
    """A module that works on the last axes, on the view of a map with the channels last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim not in MAPS:
            return self.inner(x)
        return self.inner(x.movedim(1, -1)).movedim(-1, 1)


def layer_norm(layer: layers.LayerNorm) -> nn.Module:
    return ChannelsLast(nn.LayerNorm(layer.output_shape[-layer.axes :], layer.epsilon))


def linear(layer: layers.Linear) -> nn.Module:
    module = nn.Linear(layer.w.shape[1], layer.features, layer.bias)
    return ChannelsLast(module) if len(layer.output_shape) + 1 in MAPS else module


class Attention(nn.Module):
    """Attention on (N, T, 3 D) arrays of queries, keys and values; dropout is not that of ours.

    Or on (N, T1, D) and (N, T2, 2 D) arrays, of `CrossAttention`.
    """

    def __init__(self, layer: layers.DotProductAttention) -> None:
        super().__init__()
        if layer.positions is not None or len(layer.input_shapes) > layer.sequences:
            raise ValueError(
                f"{layer.name}: attention with positions, lengths or documents has no twin"
            )
        self.heads, self.causal, self.dropout = layer.heads, layer.causal, layer.dropout
        self.scale, self.mask = layer.scale, None
        if layer.window is not None:
            queries, keys = layer.output_shape[0], layer.input_shapes[-1][0]
            first, end = positions_seen(queries, keys, layer.causal, layer.window)[0].T[..., None]
            seen = (first <= np.arange(keys)) & (np.arange(keys) < end)
            self.mask, self.causal = torch.from_numpy(seen), False

    def forward(self, x: torch.Tensor, kv: torch.Tensor | None = None) -> torch.Tensor:
        parts = x.chunk(3, -1) if kv is None else (x, *kv.chunk(2, -1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(
            *(q, k, v, self.mask, self.dropout if self.training else 0.0, self.causal),
            scale=self.scale,
        )
        return y.transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    """One direction of a recurrent layer, whose modules in PyTorch begin with the forward one."""

    def __init__(self, layer: layers.LSTMLayer | layers.GRULayer, kind: type[nn.Module]) -> None:
        super().__init__()
        self.reverse, self.every = layer.reverse, layer.return_sequences
        self.inner = kind(layer.w.shape[1], layer.features, bias=layer.bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.inner(x.flip(1) if self.reverse else x)
        if not self.every:
            return y[:, -1]
        return y.flip(1) if self.reverse else y


class ClassToken(nn.Module):
    """A vector before the first position."""

    def __init__(self, layer: layers.ClassToken) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(layer.output_shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.expand(len(x), 1, -1), x], 1)


class PositionalEmbedding(nn.Module):
    """A vector added to each position."""

    def __init__(self, layer: layers.PositionalEmbedding) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(layer.output_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w


class Embedding(nn.Module):
    """Rows of a matrix; a tied use computes logits with that of `first`."""

    def __init__(self, layer: layers.Embedding, first: Embedding | None = None) -> None:
        super().__init__()
        if first is None:
            self.w = nn.Parameter(torch.zeros(layer.tokens, layer.features))
        self.first = [first]  # a list: its parameters are not this module's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first[0]
        return F.embedding(x.long(), self.w) if first is None else F.linear(x, first.w)


def nhwc(function: Callable[[torch.Tensor], torch.Tensor]) -> Convert:
    """Apply a function to the NHWC view, where shapes and axes mean what they mean in pydtnn."""

    def apply(*xs: torch.Tensor) -> torch.Tensor:
        y = function(*(x.movedim(1, -1) if x.ndim in MAPS else x for x in xs))
        return y.movedim(-1, 1) if y.ndim in MAPS else y

    return Apply(apply)


CONVERTERS: dict[type[Layer], Convert] = {
    layers.Conv1d: conv,
    layers.Conv2d: conv,
    layers.Conv3d: conv,
    layers.ConvTranspose2d: conv_transpose,
    layers.Upsample: upsample,
    FusedConv2d: conv,
    layers.Linear: linear,
    layers.BatchNorm: batch_norm,
    NormAddReLU: WrittenOut,
    layers.GroupNorm: group_norm,
    layers.LayerNorm: layer_norm,
    layers.LocalResponseNorm: lambda layer: nn.LocalResponseNorm(
        layer.size, layer.alpha, layer.beta, layer.k
    ),
    layers.MaxPool1d: lambda layer: ChannelsSecond(max_pool(layer)),
    layers.MaxPool2d: max_pool,
    layers.MaxPool3d: max_pool,
    layers.AvgPool1d: lambda layer: ChannelsSecond(average_pool(layer)),
    layers.AvgPool2d: average_pool,
    layers.AvgPool3d: average_pool,
    layers.AdaptiveAvgPool2d: lambda layer: nn.AdaptiveAvgPool2d(layer.output),
    layers.GlobalAvgPool1d: lambda layer: Apply(lambda x: x.mean(1)),
    layers.GlobalAvgPool2d: lambda layer: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    layers.GlobalAvgPool3d: lambda layer: nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten()),
    layers.ReLU: lambda layer: nn.ReLU(inplace=layer.overwrites_input),
    layers.ReLU6: lambda layer: nn.ReLU6(),
    layers.LeakyReLU: lambda layer: nn.LeakyReLU(layer.alpha),
    layers.ELU: lambda layer: nn.ELU(layer.alpha),
    layers.Sigmoid: lambda layer: nn.Sigmoid(),
    layers.Tanh: lambda layer: nn.Tanh(),
    layers.ArcTan: lambda layer: Apply(torch.arctan),
    layers.Log: lambda layer: Apply(torch.log),
    layers.GELU: lambda layer: nn.GELU(approximate=layer.approximate),
    layers.SiLU: lambda layer: nn.SiLU(),
    layers.HardSwish: lambda layer: nn.Hardswish(),
    # nn.Hardsigmoid's gradient has 1/6 in float32
    layers.HardSigmoid: lambda layer: Apply(lambda x: nn.functional.relu6(x + 3) / 6),
    layers.Softplus: lambda layer: nn.Softplus(threshold=60),
    layers.LogSoftmax: lambda layer: nhwc(lambda x: torch.log_softmax(x, -1)),
    layers.Softmax: lambda layer: nhwc(lambda x: torch.softmax(x, -1)),
    layers.Identity: lambda layer: nn.Identity(),
    layers.Rescale: lambda layer: Apply(lambda x: x * layer.factor),
    layers.Reshape: lambda layer: nhwc(lambda x: x.reshape(len(x), *layer.output_shape)),
    layers.Flatten: lambda layer: nhwc(lambda x: x.reshape(len(x), *layer.output_shape)),
    layers.Pad: lambda layer: nhwc(
        lambda x: F.pad(x, [n for p in reversed(layer.padding) for n in p])
    ),
    layers.Slice: lambda layer: nhwc(lambda x: x[(slice(None), *layer.slices)]),
    layers.Add: lambda layer: Apply(lambda *xs: sum(xs[1:], xs[0])),
    layers.Concat: lambda layer: nhwc(
        lambda *xs: torch.cat(xs, layer.axis if layer.axis < 0 else layer.axis + 1)
    ),
    layers.Dropout: lambda layer: nn.Dropout(layer.rate),
    layers.DotProductAttention: Attention,
    layers.CrossAttention: Attention,
    layers.LSTMLayer: lambda layer: Recurrent(layer, nn.LSTM),
    layers.GRULayer: lambda layer: Recurrent(layer, nn.GRU),
    layers.Embedding: Embedding,
    layers.ClassToken: ClassToken,
    layers.PositionalEmbedding: PositionalEmbedding,
}


def convert(layer: Layer) -> nn.Module:
    """Make the module that computes what a built layer computes."""
    return CONVERTERS[type(layer)](layer)
