"""Features behind Flatten have the order of other programs, in random networks of joined branches.

What PyTorch computes of signals, images or volumes with channels first is computed here by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from pydtnn import layers
from pydtnn.layers import Branches, Concat, Flatten, Linear, Reshape, Sequential
from pydtnn.model import Model
from pydtnn.tools.interchange import load_state_dict, state_dict
from tests.each import each

Arrays = Iterator[np.ndarray]
Call = Callable[[np.ndarray, Arrays], np.ndarray]
"""Computes outputs of inputs with channels first, and of the next arrays of a state dict."""


CONVOLUTIONS: list[Any] = [layers.Conv1d, layers.Conv2d, layers.Conv3d]


def joined(rng: np.random.Generator, axes: int, depth: int = 2) -> tuple[Any, Call]:
    """Two to four branches of features, of which some are such branches, and perhaps a norm."""
    pairs = [branch(rng, axes, depth) for _ in range(int(rng.integers(2, 5)))]
    ours, theirs = zip(*pairs, strict=True)
    norm = bool(rng.random() < 0.5)

    def call(x: np.ndarray, arrays: Arrays) -> np.ndarray:
        y = np.concatenate([one(x, arrays) for one in theirs], 1)
        if norm:
            gamma, beta, mean, variance, _ = (next(arrays) for _ in range(5))
            y = (y - mean) / np.sqrt(variance + 1e-5) * gamma + beta
        return y

    merge = Sequential(Concat(), layers.BatchNorm()) if norm else Concat()
    return Branches(*ours, merge=merge), call


def branch(rng: np.random.Generator, axes: int, depth: int) -> tuple[Any, Call]:
    """A convolution and perhaps more layers of maps, flattened and perhaps mixed again."""
    if depth and rng.random() < 0.4:
        return joined(rng, axes, depth - 1)
    twice, padded, sliced, mixed = rng.random(4) < 0.3
    ours: list[Any] = [CONVOLUTIONS[axes - 1](int(rng.integers(1, 5)), 2)]
    if twice:
        ours.append(Branches(layers.Identity(), layers.Identity(), merge=Concat()))
    if padded:
        ours.append(layers.Pad(((1, 2), *[(0, 0)] * axes)))
    if sliced:
        ours.append(layers.Slice(slice(1, -1)))

    def call(x: np.ndarray, arrays: Arrays) -> np.ndarray:
        w, b = next(arrays), next(arrays)
        windows = sliding_window_view(x, w.shape[2:], axis=tuple(range(2, x.ndim)))
        y = np.tensordot(windows, w, ([1, *range(x.ndim, windows.ndim)], [*range(1, w.ndim)]))
        y = np.moveaxis(y + b, -1, 1)
        y = np.concatenate([y, y], 1) if twice else y
        y = np.pad(y, ((0, 0), (0, 0), (1, 2), *[(0, 0)] * (axes - 1))) if padded else y
        y = (y[:, :, 1:-1] if sliced else y).reshape(len(y), -1)
        return y @ next(arrays).T + next(arrays) if mixed else y

    return Sequential(*ours, Flatten(), *[Linear(3)] * bool(mixed)), call


@each("seed", range(25))
def test_joined_and_nested_branches_have_the_columns_of_pytorch(seed):
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(1, 4))
    shape = (*(int(n) for n in rng.integers(5, 8, axes)), int(rng.integers(2, 4)))
    net, call = joined(rng, axes)
    model = Model(Sequential(net, Linear(3)), shape, dtype="float64")
    state = {name: rng.uniform(0.5, 1.5, array.shape) for name, array in model.state().items()}
    model.load(state)
    x, theirs = rng.normal(size=(3, *shape)), state_dict(model)
    arrays = iter(theirs.values())
    features = call(np.moveaxis(x, -1, 1), arrays)
    expected = features @ next(arrays).T + next(arrays)
    assert next(arrays, None) is None
    np.testing.assert_allclose(model.predict(x), expected, atol=1e-10 * abs(expected).max())
    model.load({name: 0 * array for name, array in state.items()})
    assert not load_state_dict(model, theirs).misfits
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, state[name])


@each("bias", [False, True])
@each(
    ("shape", "conv"),
    [((4, 5, 6), layers.Conv2d), ((5, 6), layers.Conv1d)],
)
def test_features_that_become_an_image_are_refused(shape, conv, bias):
    net = Sequential(
        Linear(int(np.prod(shape))), Reshape(shape), conv(3, 2, bias=bias, name="conv")
    )
    with pytest.raises(ValueError, match="conv: the order of its inputs in other programs must be"):
        state_dict(Model(net, (7,)))


def test_flattened_sums_of_signals_and_sequences_are_refused():
    def tokens() -> list[Any]:
        both = Branches(layers.Identity(), layers.Conv1d(4, 3, padding=1), merge=layers.Add())
        return [layers.Embedding(9, 4), layers.LayerNorm(), both]

    net = Sequential(*tokens(), Flatten(name="flat"), Linear(3, name="head"))
    with pytest.raises(ValueError, match="head: the order .* is not behind flat"):
        state_dict(Model(net, (6,)))
    net = Sequential(*tokens(), layers.LayerNorm(), Linear(3, name="head"))
    assert state_dict(Model(net, (6,)))["head.weight"].shape == (3, 4)
