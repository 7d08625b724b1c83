"""Random modules of PyTorch: a few steps, each of which suits the value before it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Call(nn.Module):
    """A function of a value, and perhaps of modules and a parameter."""

    def __init__(self, function: Any, *parts: nn.Module, w: Any = None) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        self.w = None if w is None else nn.Parameter(w)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def masks(length: int) -> dict[str, Any]:
    """Return masks of attention: which keys are seen, or what is added to scores."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    slopes, causal = (2.0 ** torch.tensor([-4, -8])).double()[:, None, None], back >= 0
    hidden = torch.where(causal, 0.0, -torch.inf).double()
    seen = {"causal": causal, "band": abs(back) < 2, "window": causal & (back < 3)}
    biases = {"slopes": hidden - slopes * back, "distances": 0.1 * back.double() ** 2}
    return {**seen, **biases, "hidden": hidden, "even": back % 2 < 1}


class Attention(nn.Module):
    """Attention of two heads with a mask, written by hand or by a function of PyTorch."""

    def __init__(self, c: int, mask: Any, scale: float, by_hand: bool) -> None:
        super().__init__()
        self.qkv, self.by_hand, self.scale = nn.Linear(c, 3 * c), by_hand, scale
        self.register_buffer("mask", mask)

    def forward(self, x: Any) -> Any:
        (n, t, c), mask = x.shape, self.mask
        q, k, v = self.qkv(x).view(n, t, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) * self.scale
            seen = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -torch.inf) if seen else scores + mask
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return y.transpose(1, 2).reshape(n, t, c)


def _any(r: random.Random, x: Any) -> list[Any]:
    wide, axis = (x.shape[1], *[1] * (x.ndim - 2)), r.choice([1, -1])
    buffered = Call(lambda m, x: x * m.factor)
    buffered.register_buffer("factor", torch.rand(wide) + 0.5)
    usual = [nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(), nn.Dropout(0.2), nn.Softmax(-1)]
    others = [nn.Tanh(), nn.ELU(0.7), nn.LeakyReLU(0.3), nn.Softsign(), nn.Mish(), buffered]
    return [
        *(*usual, *others, Call(lambda m, x: 1 - x / 3), Call(lambda m, x: x.flatten(axis % 3))),
        Call(lambda m, x: torch.cat([x, m.parts[0](x)], axis), r.choice(usual)),
        Call(lambda m, x: x + m.w, w=torch.randn(r.choice([wide, x.shape[1:]]))),
        *(Call(lambda m, x: x[:, 1:]), Call(lambda m, x: torch.chunk(x, 2, axis)[0])),
        *(Call(lambda m, x: x.reshape(len(x), 2, -1)), Call(lambda m, x: x.mean(axis))),
    ]


def _features(r: random.Random, x: Any) -> list[Any]:
    c, o, bias = x.shape[-1], r.choice([3, 4, 6]), r.random() < 0.7
    made = [nn.LayerNorm(c, r.choice([1e-5, 1 / 3]), bias, bias), nn.RMSNorm(c), nn.Linear(c, o)]
    if x.ndim == 2:
        made.append(nn.BatchNorm1d(c, 1e-2, r.choice([0.1, 0.3, None]), bias, r.random() < 0.8))
    shared = Call(lambda m, x: m.parts[0](torch.tanh(m.parts[0](x))), nn.Linear(c, c))
    return [*made, nn.Linear(c, o, bias), shared, Call(lambda m, x: x @ m.w, w=torch.randn(c, o))]


def _sequence(r: random.Random, x: Any) -> list[Any]:
    (t, c), both, place = x.shape[1:], r.random() < 0.5, r.choice([0, -1])
    recurrent = r.choice([nn.LSTM, nn.GRU])(c, 3, r.choice([1, 2]), both, True, 0.0, both)
    own, other = (nn.MultiheadAttention(c, 2 - c % 2, bias=both, batch_first=True) for _ in "ab")
    k, s, p, d = (r.choice(n) for n in ([2, 3], [1, 2], [0, 1], [1, 1, 2]))
    return [
        Call(lambda m, x: m.parts[0](x)[0] if place else m.parts[0](x)[1][0][-1], recurrent),
        nn.Conv1d(t, 4, k, s, p, d, padding_mode=r.choice(["zeros", "zeros", "circular"])),
        nn.TransformerEncoderLayer(c, 2 - c % 2, 5, 0.0, batch_first=True, norm_first=both),
        Call(lambda m, x: m.parts[0](x, x[:, :2], x[:, :2])[0], other),
        Call(lambda m, x: m.parts[0](x, x, x, need_weights=place == 0)[0], own),
        *(Attention(c, mask, r.choice([0.3, 1.0]), both) for mask in masks(t).values()),
        *(nn.MaxPool1d(k, s, p, d, ceil_mode=both), nn.AvgPool1d(k, s, p, both, place == 0)),
        *(nn.GroupNorm(2, t), nn.InstanceNorm1d(t, affine=both), nn.BatchNorm1d(t)),
        *(Call(lambda m, x: x.transpose(1, 2)), Call(lambda m, x: x[:, place])),
        Call(lambda m, x: torch.cat([m.w.expand(len(x), 1, c), x], 1), w=torch.randn(1, 1, c)),
    ]


def _image(r: random.Random, x: Any) -> list[Any]:
    c, groups = x.shape[1], r.choice([g for g in (1, 1, 2, x.shape[1]) if x.shape[1] % g == 0])
    o, bias, ceil, count = groups * r.choice([1, 2, 3]), *(r.random() < 0.6 for _ in range(3))
    k, s, p, d = (r.choice(n) for n in ([1, 2, 3, (3, 1)], [1, 1, 2, (2, 1)], [0, 1], [1, 1, 2]))
    epsilon, bins, mode = r.choice([1e-5, 1e-2]), r.choice([1, 2]), r.choice(["circular", "zeros"])
    if x.ndim == 5:
        pools = [nn.MaxPool3d(2, ceil_mode=ceil), nn.AvgPool3d(2, 1, 1, ceil, count)]
        return [nn.Conv3d(c, 3, 2, 1, p), nn.BatchNorm3d(c), *pools]
    return [
        *(nn.Conv2d(c, o, k, s, p, d, groups, bias, m) for m in (mode, "zeros")),
        *(nn.Conv2d(c, o, k, 1, "same", d, groups, bias), nn.PixelShuffle(2)),
        nn.ConvTranspose2d(c, o, k, 2, p, r.choice([0, 1]), groups, bias, d),
        *(nn.BatchNorm2d(c, epsilon, 0.3, bias or ceil), nn.LayerNorm(x.shape[bins:], epsilon)),
        *(nn.GroupNorm(bins, c, epsilon, bias), nn.InstanceNorm2d(c, affine=bias)),
        *(nn.MaxPool2d(k, s, p, d, ceil_mode=ceil), nn.AvgPool2d(k, s, p, ceil, count)),
        *(nn.AdaptiveAvgPool2d(1 + bins), nn.AdaptiveMaxPool2d(bins), nn.ZeroPad2d((1, 0, 2, 1))),
        nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "bilinear"])),
        Call(lambda m, x: x * m.parts[0](x.mean((2, 3), True)).sigmoid(), nn.Conv2d(c, c, 1)),
        Call(lambda m, x: m.parts[0](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.Linear(c, 3)),
        Call(lambda m, x: x.flatten(2).transpose(1, 2)),
        Call(lambda m, x: m.parts[0](m.parts[0](x)), nn.Conv2d(c, c, 3, padding=1)),
    ]


STEPS = {2: _features, 3: _sequence, 4: _image, 5: _image}


def _step(r: random.Random, x: Any, depth: int = 0) -> tuple[nn.Module, Any]:
    """Return a step that suits a value, perhaps with a residual, and its result."""
    while True:
        try:
            make = r.choice([STEPS[x.ndim], STEPS[x.ndim], _features, _any])
            made = r.choice(make(r, x))
            if depth < 2 and r.random() < 0.2:
                other, y = _step(r, x, depth + 1)
                add = Call(lambda m, x: x - m.parts[0](x), other)
                made = add if y.shape == x.shape else made
            with torch.no_grad():
                y = made.double()(x.clone())
            if y.ndim in STEPS and len(y) == len(x) and y.isfinite().all() and y.numel() < 3000:
                return made, y
        except (RuntimeError, ValueError, IndexError, AssertionError):
            continue


def random_module(seed: int) -> tuple[nn.Module, Any]:
    """Return a module in float64 and training mode, and an example of inputs."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape = r.choice([(4,), (5, 4), (6, 6), (3, 8, 8), (4, 7, 6), (2, 4, 5, 4), ()])
    steps: list[nn.Module] = []
    x = example = torch.randn(4, *shape).double() if shape else torch.randint(7, (4, 5))
    if not shape:
        steps.append(nn.Embedding(7, 4, padding_idx=r.choice([None, 0, 3])).double())
        x = steps[0](x).detach()
    for _ in range(r.choice([2, 3, 4, 5])):
        step, x = _step(r, x)
        steps.append(step)
    steps[0].requires_grad_(r.random() < 0.8)
    for part in nn.ModuleList(steps).modules():
        if getattr(part, "running_mean", None) is not None:
            part.reset_running_stats()
            part.running_var.uniform_(0.5, 1.5)
    return nn.Sequential(*steps), example
