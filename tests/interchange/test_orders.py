"""Features behind Flatten have the order of PyTorch, in random networks of joined branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.interchange import load_state_dict, state_dict
from pydtnn.layers import Branches, Concat, Flatten, Linear, Reshape, Sequential
from pydtnn.model import Model
from tests.each import each
from tests.interchange.twins import nn, torch


class Joined(nn.Module):
    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        return torch.cat([part(x) for part in self.parts], 1)


class Rows(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, :, 1:-1]


class Pair:
    """The same random network here and in PyTorch, of images (H, W, C) or signals (L, C)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, axes = rng, int(rng.integers(1, 3))
        self.shape = (*(int(n) for n in rng.integers(5, 8, axes)), int(rng.integers(2, 4)))
        self.axes = axes
        ours, theirs = self.joined(depth=2)
        self.module = nn.Sequential(theirs, nn.LazyLinear(3)).double()
        with torch.no_grad():
            self.module(torch.zeros(2, self.shape[-1], *self.shape[:-1], dtype=torch.double))
        self.module.eval()
        for tensor in self.module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, tensor.shape)))
        self.model = Model(Sequential(ours, Linear(3)), self.shape, dtype="float64")

    def joined(self, depth: int) -> tuple[Any, Any]:
        """Two to four branches of features, of which some are such branches, and a norm."""
        pairs = [self.branch(depth) for _ in range(int(self.rng.integers(2, 5)))]
        ours, theirs = zip(*pairs, strict=True)
        if self.rng.random() < 0.5:
            return Branches(*ours, merge=Concat()), Joined(*theirs)
        joined = Branches(*ours, merge=Sequential(Concat(), layers.BatchNorm()))
        return joined, nn.Sequential(Joined(*theirs), nn.LazyBatchNorm1d())

    def branch(self, depth: int) -> tuple[Any, Any]:
        if depth and self.rng.random() < 0.4:
            return self.joined(depth - 1)
        pairs = [self.layer() for _ in range(int(self.rng.integers(1, 3)))]
        ours, theirs = zip(*pairs, strict=True)
        if self.rng.random() < 0.3:  # maps are joined with the input before they are flattened
            before = Branches(layers.Identity(), layers.Identity(), merge=Concat())
            return (
                Sequential(before, *ours, Flatten()),
                nn.Sequential(Joined(nn.Identity(), nn.Identity()), *theirs, nn.Flatten()),
            )
        if self.rng.random() < 0.2:
            features = int(self.rng.integers(2, 5))
            head, linear = Linear(features), nn.LazyLinear(features)
            return Sequential(*ours, Flatten(), head), nn.Sequential(*theirs, nn.Flatten(), linear)
        return Sequential(*ours, Flatten()), nn.Sequential(*theirs, nn.Flatten())

    def layer(self) -> tuple[Any, Any]:
        """A layer of images or signals, that keeps the size or makes it a little smaller."""
        filters, axes = int(self.rng.integers(1, 5)), self.axes
        convs = {1: (layers.Conv1d, nn.LazyConv1d), 2: (layers.Conv2d, nn.LazyConv2d)}
        pools = {1: (layers.MaxPool1d, nn.MaxPool1d), 2: (layers.MaxPool2d, nn.MaxPool2d)}
        makers: list[Callable[[], tuple[Any, Any]]] = [
            lambda: (convs[axes][0](filters, 2), convs[axes][1](filters, 2)),
            lambda: (pools[axes][0](2, stride=1), pools[axes][1](2, 1)),
            lambda: (
                layers.Pad(((1, 2), *[(0, 0)] * axes)),
                nn.ZeroPad2d((0, 0, 1, 2)) if axes == 2 else nn.ConstantPad1d((1, 2), 0.0),
            ),
            lambda: (layers.Slice(slice(1, -1)), Rows()),
        ]
        return makers[int(self.rng.choice(4, p=(0.55, 0.15, 0.15, 0.15)))]()

    def logits(self, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(self.module(torch.from_numpy(np.moveaxis(x, -1, 1).copy())))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(500 if metafunc.config.getoption("--matrix") else 10))


def has_filters(pair: Pair) -> bool:
    """Whether a layer of filters or windows reads the input: it may be a sequence otherwise."""
    kinds = (layers.Conv1d, layers.MaxPool1d)
    return pair.axes == 2 or any(
        issubclass(p.layer.kind, kinds) for p in pair.model.description.parts
    )


def test_joined_and_nested_branches_have_the_columns_of_pytorch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = Pair(rng)
    while not has_filters(pair):
        pair = Pair(rng)
    x = rng.normal(size=(3, *pair.shape))
    report = load_state_dict(pair.model, pair.module.state_dict())
    assert not report.misfits
    expected = pair.logits(x)
    np.testing.assert_allclose(pair.model.predict(x), expected, atol=1e-10 * abs(expected).max())
    arrays = state_dict(pair.model, like=pair.module.state_dict())
    for name, tensor in pair.module.state_dict().items():
        assert name.endswith("tracked") or np.array_equal(arrays[name], tensor.numpy()), name


@each("bias", [False, True])
@each(
    ("shape", "conv"),
    [((4, 5, 6), layers.Conv2d), ((5, 6), layers.Conv1d)],
)
def test_features_that_become_an_image_are_refused(
    shape: tuple[int, ...], conv: Any, bias: bool
) -> None:
    net = Sequential(
        Linear(int(np.prod(shape))), Reshape(shape), conv(3, 2, bias=bias, name="conv")
    )
    with pytest.raises(ValueError, match="conv: the order of its inputs in other programs must be"):
        state_dict(Model(net, (7,)))


def test_flattened_sums_of_signals_and_sequences_are_refused() -> None:
    def tokens() -> list[Any]:
        both = Branches(layers.Identity(), layers.Conv1d(4, 3, padding=1), merge=layers.Add())
        return [layers.Embedding(9, 4), layers.LayerNorm(), both]

    net = Sequential(*tokens(), Flatten(name="flat"), Linear(3, name="head"))
    with pytest.raises(ValueError, match="head: the order .* is not behind flat"):
        state_dict(Model(net, (6,)))
    net = Sequential(*tokens(), layers.LayerNorm(), Linear(3, name="head"))
    assert state_dict(Model(net, (6,)))["head.weight"].shape == (3, 4)
