"""Random modules of PyTorch: a few steps, each of which suits the value before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

MAX_ELEMENTS = 600
"""Of a sample of a value."""


class Call(nn.Module):
    """A function of a value, and perhaps modules and parameters."""

    def __init__(self, function: Any, *parts: nn.Module, **parameters: torch.Tensor) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def _activation(r: random.Random) -> list[Any]:
    part = r.choice([nn.ReLU(), nn.SiLU(), nn.Dropout(0.1)])
    usual = [nn.ReLU(inplace=True), nn.GELU(), nn.Tanh(), nn.Dropout(0.2), nn.Softmax(-1), part]
    others = [nn.ELU(0.7), nn.LeakyReLU(0.3), nn.SELU(), nn.Mish(), nn.LogSigmoid(), nn.Softsign()]
    functions = [torch.square, lambda x: x**2, lambda x: 1 - x / 3, lambda x: F.normalize(x, dim=1)]
    return [*usual, *usual, *others, *(Call(lambda m, x, f=f: f(x)) for f in functions)]


def _any(r: random.Random, x: Any) -> list[Any]:
    """Return steps for a value of any shape."""
    wide, axis, start = (x.shape[1], *[1] * (x.ndim - 2)), r.choice([1, -1]), r.choice([1, 2])
    buffered = Call(lambda m, x: x * m.factor)
    buffered.register_buffer("factor", torch.rand(wide) + 0.5)
    functions = [
        lambda x: torch.chunk(x, 2, axis)[0],
        lambda x: x[:, 1:] if start == 1 else x[..., ::2],
        lambda x: F.glu(x, axis),
        lambda x: x.movedim(-1, 1),
        lambda x: x.reshape(len(x), 2, -1),
        lambda x: x.flatten(start),
        lambda x: x.mean(axis, keepdim=start == 1),
        lambda x: x.amax(axis),
        lambda x: x.roll(1, -1),
    ]
    added = Call(lambda m, x: x + m.w, w=torch.randn(r.choice([wide, x.shape[1:], (1,)])))
    kept = Call(lambda m, x: torch.cat([x, m.parts[0](x)], axis), r.choice(_activation(r)))
    return [
        *(Call(lambda m, x, f=f: f(x)) for f in functions),
        *_activation(r),
        buffered,
        added,
        kept,
    ]


def _features(r: random.Random, x: Any) -> list[Any]:
    """Return steps that compute with the last axis, or with (N, C)."""
    c, o, bias = x.shape[-1], r.choice([3, 4, 6]), r.random() < 0.7
    norms = [nn.LayerNorm(c, r.choice([1e-5, 1 / 3]), bias, bias), nn.RMSNorm(c)]
    if x.ndim == 2:
        norms.append(nn.BatchNorm1d(c, 1e-2, r.choice([0.1, 0.3, None]), bias, r.random() < 0.8))
    product = Call(lambda m, x: torch.einsum("n...c,oc->n...o", x, m.w), w=torch.randn(o, c))
    shared = Call(lambda m, x: m.parts[0](torch.tanh(m.parts[0](x))), nn.Linear(c, c))
    matrix = Call(lambda m, x: x @ m.w, w=torch.randn(c, o))
    return [nn.Linear(c, o, bias), nn.Linear(c, o), *norms, product, shared, matrix]


def masks(length: int) -> dict[str, Any]:
    """Return masks of attention: which keys are seen, or what is added to scores."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    slopes = (2.0 ** torch.tensor([-4, -8])).double()[:, None, None]
    causal = back >= 0
    hidden = torch.where(causal, 0.0, -torch.inf).double()
    windows = {"band": abs(back) < 2, "window": causal & (back < 3)}
    biases = {"slopes": hidden - slopes * back, "distances": 0.1 * back.double() ** 2}
    return {
        "none": None,
        "causal": causal,
        "hidden": hidden,
        "even": back % 2 < 1,
        **windows,
        **biases,
    }


class Attention(nn.Module):
    """Attention of two heads with a mask, written by hand or by a function of PyTorch."""

    def __init__(self, c: int, mask: Any, scale: float | None, by_hand: bool) -> None:
        super().__init__()
        self.qkv, self.heads, self.by_hand, self.scale = nn.Linear(c, 3 * c), 2, by_hand, scale
        self.register_buffer("mask", mask)

    def forward(self, x: Any) -> Any:
        n, t, c = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        (q, k, v), mask = qkv.unbind(0), self.mask
        if not self.by_hand:
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
            return y.transpose(1, 2).reshape(n, t, c)
        scores = q @ k.transpose(-2, -1) * (self.scale or q.shape[-1] ** -0.5)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c)


def _sequence(r: random.Random, x: Any) -> list[Any]:
    """Return steps for (N, T, C), or (N, C, L)."""
    t, c = x.shape[1:]
    kind, both, place = r.choice([nn.LSTM, nn.GRU]), r.random() < 0.5, r.choice([0, -1])
    recurrent = kind(c, 3, r.choice([1, 2]), r.random() < 0.8, True, bidirectional=both)
    own, other = (nn.MultiheadAttention(c, 2 - c % 2, bias=both, batch_first=True) for _ in "ab")
    k, s, p, d = (r.choice(n) for n in ([2, 3], [1, 2], [0, 1], [1, 1, 2]))
    return [
        Call(lambda m, x: m.parts[0](x)[0] if place else m.parts[0](x)[1][0][-1], recurrent),
        nn.Conv1d(t, 4, k, s, p, d, padding_mode=r.choice(["zeros", "zeros", "circular"])),
        nn.BatchNorm1d(t, momentum=r.choice([0.1, 0.3])),
        nn.TransformerEncoderLayer(c, 1 + (c % 2 == 0), 5, 0.0, batch_first=True, norm_first=both),
        Call(lambda m, x: m.parts[0](x, x[:, :2], x[:, :2])[0], other),
        Call(lambda m, x: m.parts[0](x, x, x, need_weights=place == 0)[0], own),
        *(Attention(c, mask, r.choice([None, 0.3]), both) for mask in masks(t).values()),
        r.choice(
            [nn.MaxPool1d(k, s, p, d, ceil_mode=both), nn.AvgPool1d(k, s, p, both, place == 0)]
        ),
        *(nn.GroupNorm(2, t), nn.InstanceNorm1d(t, affine=both)),
        Call(lambda m, x: x.transpose(1, 2)),
        Call(lambda m, x: x[:, place]),
        Call(lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), w=torch.randn(1, 1, c)),
    ]


def _image(r: random.Random, x: Any) -> list[Any]:
    """Return steps for (N, C, H, W), or (N, C, D, H, W)."""
    c, groups = x.shape[1], r.choice([g for g in (1, 1, 2, x.shape[1]) if x.shape[1] % g == 0])
    o, bias, ceil, count = groups * r.choice([1, 2, 3]), *(r.random() < 0.6 for _ in range(3))
    k, s, p, d = (r.choice(n) for n in ([1, 2, 3, (3, 1)], [1, 1, 2, (2, 1)], [0, 1], [1, 1, 2]))
    momentum, epsilon = r.choice([0.1, 0.3]), r.choice([1e-5, 1e-2])
    mode = r.choice(["zeros", "zeros", "circular", "reflect"])
    if x.ndim == 5:
        pools = [nn.MaxPool3d(2, ceil_mode=ceil), nn.AvgPool3d(2, 1, 1, ceil, count)]
        return [nn.Conv3d(c, 3, 2, 1, p), nn.BatchNorm3d(c), *pools]
    squeeze = [nn.Conv2d(c, 2, 1), nn.Conv2d(2, c, 1)]
    return [
        *(nn.Conv2d(c, o, k, s, p, d, groups, bias, m) for m in (mode, "zeros")),
        *(nn.Conv2d(c, o, k, 1, "same", d, groups, bias), nn.PixelShuffle(2)),
        nn.ConvTranspose2d(c, o, k, 2, p, r.choice([0, 1]), groups, bias, d),
        *(nn.BatchNorm2d(c, epsilon, momentum, bias or ceil), nn.BatchNorm2d(c, epsilon)),
        *(nn.GroupNorm(r.choice([1, 2]), c, epsilon, bias), nn.InstanceNorm2d(c, affine=bias)),
        nn.LayerNorm(x.shape[r.choice([1, 2, 3]) :], epsilon, bias),
        *(nn.MaxPool2d(k, s, p, d, ceil_mode=ceil), nn.AvgPool2d(k, s, p, ceil, count)),
        *(nn.AdaptiveAvgPool2d(r.choice([1, 2, 3])), nn.AdaptiveMaxPool2d(r.choice([1, 2]))),
        nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "bilinear"])),
        *(nn.ZeroPad2d((1, 0, 2, 1)), nn.ConstantPad2d(1, 0.5)),
        Call(lambda m, x: x * m.parts[1](m.parts[0](x.mean((2, 3), True)).relu()), *squeeze),
        Call(lambda m, x: m.parts[0](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.Linear(c, 3)),
        Call(lambda m, x: torch.einsum("nchw,oc->nohw", x, m.w), w=torch.randn(3, c)),
        Call(lambda m, x: x.flatten(2).transpose(1, 2)),
        Call(lambda m, x: m.parts[0](m.parts[0](x)), nn.Conv2d(c, c, 3, padding=1)),
    ]


STEPS: dict[int, list[Callable[..., list[Any]]]] = {
    2: [_features, _features, _any],
    3: [_sequence, _sequence, _features, _any],
    4: [_image, _image, _any],
    5: [_image, _image, _any],
}


def _step(r: random.Random, x: Any, depth: int = 0) -> tuple[nn.Module, Any]:
    """Return a step that suits a value, perhaps with a residual, and its result."""
    while True:
        try:
            made = r.choice(r.choice(STEPS[x.ndim])(r, x))
            if depth < 2 and r.random() < 0.2:
                other, y = _step(r, x, depth + 1)
                sign = r.choice([1, 1, -1])
                if y.shape == x.shape:
                    made = Call(lambda m, x, sign=sign: x + sign * m.parts[0](x), other)
                elif y.ndim == x.ndim:
                    made = Call(lambda m, x: torch.cat([x, m.parts[0](x)], 1), other)
            made = made.double()
            with torch.no_grad():
                y = made(x.clone())
            fits = y.ndim in STEPS and len(y) == len(x) and y.isfinite().all()
        except (RuntimeError, ValueError, IndexError, AssertionError):
            continue
        if fits and 2 <= y[0].numel() <= MAX_ELEMENTS:
            return made, y


def random_module(seed: int) -> tuple[nn.Module, Any]:
    """Return a module in float64 and training mode, and an example of inputs."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape = r.choice([(4,), (5, 4), (6, 6), (3, 8, 8), (4, 7, 6), (2, 4, 5, 4), ()])
    steps: list[nn.Module] = []
    x: Any = torch.randn(4, *shape).double() if shape else torch.randint(7, (4, 5))
    example = x
    if not shape:
        steps.append(nn.Embedding(7, 4, padding_idx=r.choice([None, 0, 3])).double())
        x = steps[0](x).detach()
    for _ in range(r.choice([2, 3, 4, 5])):
        step, x = _step(r, x)
        steps.append(step)
    module = nn.Sequential(*steps)
    if r.random() < 0.2:
        steps[r.randrange(len(steps))].requires_grad_(False)
    for part in module.modules():
        if getattr(part, "running_mean", None) is not None:
            part.reset_running_stats()
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 1.5)
    return module, example
