"""Operators of ONNX that normalise."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from pydtnn import layers
from pydtnn.layers.node import Node
from pydtnn.tools.interchange.onnx.reading import Read, Reading, ordered, resolved
from pydtnn.tools.interchange.onnx.views import Atoms, Value, size_of

Array = np.ndarray


def _batch_norm(at: Reading) -> Value:
    if at.get("training_mode", 0) or any(at.node.outputs[1:]):
        raise at.fail("expected a network for inference, got training mode; export it again")
    x, channels, node, atoms, order = _channels(at)
    names = ("gamma", "beta", "running_mean", "running_variance")
    arrays = {name: at.required(place) for place, name in enumerate(names, start=1)}
    _check_vectors(at, channels, *arrays.values())
    momentum = round(1 - at.get("momentum", 0.9), 7)
    layer = layers.BatchNorm(epsilon=at.get("epsilon", 1e-5), momentum=momentum or 0.1)
    arrays = {name: ordered(array, order) for name, array in arrays.items()}
    return at.along(layer, x, node, atoms, **arrays)


def _channels(
    at: Reading, *, any_order: bool = True
) -> tuple[Value, int, Node, Atoms, Array | None]:
    """Return the input, its channels, and the array whose last axis they are: `Wiring.last`."""
    x = at.value()
    x.check_samples()
    channels = x.axes[x.sample_axis(1)]
    return x, size_of(channels), *at.net.last(x, channels, any_order=any_order)


def _check_vectors(at: Reading, size: int, *arrays: Array) -> None:
    for array in arrays:
        if array.shape != (size,):
            raise at.fail(f"expected vectors of {size} numbers, got {array.shape}")


def _layer_norm(at: Reading) -> Value:
    x = at.value()
    first = x.sample_axis(at.get("axis", -1))
    normed = [atom for axis in x.axes[first:] for atom in axis]
    if x.batch in normed:
        raise at.fail("the axes must not contain that of the batch")
    node, atoms, order = at.net.last(x, normed)
    size, wanted = size_of(normed), x.shape[first:]
    if at.get("count", len(wanted)) != len(wanted):
        raise at.fail("the axes must be the last ones")
    count = next(
        (m for m in range(1, len(node.shape) + 1) if prod(node.shape[-m:]) == size),
        1,
    )
    gamma, beta = at.required(1), at.constant(2)
    beta = np.zeros_like(gamma) if beta is None else beta
    full = []
    for array in (gamma, beta):
        try:
            full.append(ordered(np.broadcast_to(array, wanted).reshape(-1), order))
        except ValueError as error:
            raise at.fail(f"the scale must have the shape {wanted}, got {array.shape}") from error
    layer = layers.LayerNorm(axes=count, epsilon=at.get("epsilon", 1e-5))
    return at.along(layer, x, node, atoms, gamma=full[0], beta=full[1])


def _instance_norm(at: Reading) -> Value:
    """Read a group norm of groups of one channel."""
    x, channels, node, atoms, order = _channels(at)
    gamma, beta = at.required(1), at.required(2)
    _check_vectors(at, channels, gamma, beta)
    layer = layers.GroupNorm(channels, epsilon=at.get("epsilon", 1e-5))
    return at.along(layer, x, node, atoms, gamma=ordered(gamma, order), beta=ordered(beta, order))


def _of_reshaped_groups(
    at: Reading, x: Value, scale: Array, shift: Array
) -> tuple[int, Array, Array]:
    """Return groups, factors and terms of an instance norm of groups and those that follow it."""
    gamma, beta = at.required(3), at.required(4)
    rows, shape = (resolved(at, x, at.numbers(place)) for place in (5, 6))
    groups, channels = gamma.size, x.shape[1]
    _check_vectors(at, groups, gamma, beta)
    wide = (channels, *[1] * (len(shape) - 2))
    if (
        shape != [*x.shape]
        or rows[:2] != [shape[0], groups]
        or channels % groups
        or not {scale.shape, shift.shape} <= {wide, (1, *wide)}
    ):
        raise at.fail("expected groups of channels that are reshaped from (N, C, ...) and back")
    gamma, beta = (np.repeat(array, channels // groups) for array in (gamma, beta))
    return groups, gamma * scale.reshape(-1), beta * scale.reshape(-1) + shift.reshape(-1)


def _group_norm(at: Reading) -> Value:
    x, channels, node, atoms, _ = _channels(at, any_order=False)
    groups, gamma, beta = at.get("num_groups", 1), at.required(1), at.required(2)
    if at.inputs[3:]:
        groups, gamma, beta = _of_reshaped_groups(at, x, gamma, beta)
    else:
        _check_vectors(at, channels, gamma, beta)  # before opset 21, of groups
    layer = layers.GroupNorm(groups, epsilon=at.get("epsilon", 1e-5))
    return at.along(layer, x, node, atoms, gamma=gamma, beta=beta)


def _rms_norm(at: Reading) -> Value:
    x = at.value()
    if at.get("axis", -1) not in (-1, len(x.axes) - 1):
        raise at.fail("the axis must be the last one")
    last, gamma = x.axes[x.sample_axis(-1)], at.required(1)
    node, atoms, order = at.net.last(x, last)
    _check_vectors(at, size_of(last), gamma)
    layer = layers.RMSNorm(epsilon=at.get("epsilon", 1e-5))
    return at.along(layer, x, node, atoms, gamma=ordered(gamma, order))


def _local_response(at: Reading) -> Value:
    size = at.get("size", 0)
    if size % 2 == 0:
        raise at.fail(f"size must be odd, got {size}")
    layer = layers.LocalResponseNorm(
        size, alpha=at.get("alpha", 1e-4), beta=at.get("beta", 0.75), k=at.get("bias", 1.0)
    )
    return at.image(layer, at.value())


def _softmax(at: Reading) -> Value:
    x = at.value()
    axis = x.sample_axis(at.get("axis", -1 if at.graph.opset >= 13 else 1))
    if at.graph.opset < 13 and prod(x.shape[axis:]) != x.shape[axis]:
        raise at.fail(
            f"expected an axis whose following ones have a size of 1, before opset 13, got {axis} "
            f"of {x.given}"
        )
    node, atoms, _ = at.net.last(x, x.axes[axis])
    if not x.axes[axis]:
        raise at.fail(f"the axis must have a size above 1, got {axis} of {x.given}")
    layer = layers.Softmax() if at.node.operator == "Softmax" else layers.LogSoftmax()
    return at.along(layer, x, node, atoms)


NORMS: Mapping[str, Read] = {
    "BatchNormalization": _batch_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _softmax,
    "Softmax": _softmax,
    "rms_norm": _rms_norm,
}
"""Norms and softmax."""
