"""Order of features behind a Flatten: channels first in other programs, last here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np

from pydtnn.layers import (
    Activation,
    Add,
    AvgPool1d,
    BatchNorm,
    Concat,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    Dropout,
    GroupNorm,
    Identity,
    Linear,
    MaxPool1d,
    Multiply,
    Pad,
    Rescale,
    Reshape,
    Slice,
    Softmax,
    Transpose,
)
from pydtnn.layers.base import Shape
from pydtnn.model.description import Description, NodeSpec

Order = np.ndarray | str | None
"""Order of the features of an array.

None if it is the same in other programs. Otherwise feature i here is feature ``order[i]`` there; or
the name of the layer behind which the order is not known.
"""

KEEPS = (Activation, BatchNorm, Dropout, GroupNorm, Identity, Rescale, Softmax)
"""Layers whose outputs have the order of their inputs."""

FILTERS = (Conv1d, Conv2d, Conv3d, ConvTranspose2d)
"""Layers whose arrays "w" have the channels last, and second in other programs."""

SIGNALS = (Conv1d, MaxPool1d, AvgPool1d)
"""Layers whose outputs (L, C) are (C, L) in other programs; other sequences are the same there."""

NEW = (*FILTERS, Linear)
"""Layers whose filters determine the order of their outputs."""


def flatten_order(shape: Shape) -> np.ndarray | None:
    """Return the order of the features of a flattened image (H, W, C), which is (C, H, W) there.

    Volumes (D, H, W, C) are (C, D, H, W) there, and signals (L, C) are (C, L).

    >>> flatten_order((1, 3, 2))
    array([0, 3, 1, 4, 2, 5])
    """
    *size, channels = shape
    if channels == 1 or prod(size) == 1:
        return None
    return np.moveaxis(np.arange(prod(shape)).reshape(channels, *size), 0, -1).ravel()


def feature_orders(description: Description, *, exported: bool) -> dict[str, Order]:
    """Return the order of the output of each input and layer of a model, by name.

    Parameters
    ----------
    description : Description
    exported : bool
        Whether the other program computes the graph of `export_onnx`, which gives features that
        become images, and images whose axes are permuted, the order that they have here.
    """
    shapes, signals = shapes_by_name(description), find_signals(description)
    orders: dict[str, Order] = {name: None for name, _ in description.inputs}
    for part in description.parts:
        given = [orders[name] for name in part.inputs]
        signal = signals[part.inputs[0]]
        order = _order(part, given, [shapes[name] for name in part.inputs], signal, exported)
        orders[part.name] = order
    return orders


def find_signals(description: Description) -> dict[str, bool | None]:
    """Return of which inputs and layers the outputs (L, C) are (C, L) in other programs.

    These are the outputs of `SIGNALS`, the inputs of the model that they read, and the outputs of
    layers that keep the axes of such arrays. None if some inputs of a layer are and others are not.
    """
    shapes, parts, read = shapes_by_name(description), description.parts, set[str]()
    for part in reversed(parts):
        if issubclass(part.layer.kind, SIGNALS) or (part.name in read and _keeps_axes(part)):
            read.update(part.inputs)
    found: dict[str, bool | None] = {name: name in read for name, _ in description.inputs}
    for part in parts:
        wide = [name for name in part.inputs if len(shapes[name]) == 2 and 1 not in shapes[name]]
        given = {found[name] for name in wide or part.inputs}  # joined ones may be wide, too
        kept = (given.pop() if len(given) == 1 else None) if _keeps_axes(part) else False
        found[part.name] = True if issubclass(part.layer.kind, SIGNALS) else kept
    return found


def _keeps_axes(part: NodeSpec) -> bool:
    return issubclass(part.layer.kind, (*KEEPS, Add, Concat, Multiply, Pad, Slice))


def shapes_by_name(description: Description) -> dict[str, Shape]:
    """Return the shape of the output of each input and layer of a model."""
    return {**dict(description.inputs), **{part.name: part.shape for part in description.parts}}


def order_for(order: Order, layer: str) -> np.ndarray | None:
    """Return an order that a layer requires.

    Raises
    ------
    ValueError
        If it is not known.
    """
    if isinstance(order, str):
        raise ValueError(
            f"{layer}: the order of its inputs in other programs must be known, and is not behind "
            f"{order}; convert the arrays by hand (docs/coming_from_pytorch.md)"
        )
    return order


def same_order(a: Order, b: Order) -> bool:
    """Return whether two orders are equal."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return a is b


def _all_equal(orders: Sequence[Order]) -> bool:
    return all(same_order(orders[0], order) for order in orders)


def _order(
    part: NodeSpec,
    given: Sequence[Order],
    shapes: Sequence[Shape],
    signal: bool | None,
    exported: bool,
) -> Order:
    kind, unknown = part.layer.kind, next((o for o in given if isinstance(o, str)), "")
    if issubclass(kind, NEW):
        return None
    if issubclass(kind, Reshape):
        (source,) = shapes
        if len(source) == len(part.shape) == 1 or source == part.shape:
            return given[0]
        if len(part.shape) == 1 and signal is None and 1 not in source and not exported:
            return unknown or part.name
        if (len(source) >= 3 or signal) and len(part.shape) == 1 and not unknown:
            return flatten_order(source)
        sequence = len(source) == 2 and len(part.shape) < 3 and not signal
        same = source[-1] == part.shape[-1] or sequence or exported
        if same and given[0] is None:
            return None  # positions with their channels are the same in PyTorch
        return unknown or part.name
    if issubclass(kind, Transpose) and len(part.shape) > 2 and not exported:
        return unknown or part.name
    if issubclass(kind, KEEPS):
        return given[0]
    if all(order is None for order in given):
        return None
    if issubclass(kind, Add | Multiply) and not unknown and _all_equal(given):
        return given[0]
    if issubclass(kind, Concat) and not unknown and len(part.shape) == 1:
        sizes = [size for (size,) in shapes]
        starts = accumulate(sizes, initial=0)
        own = [
            (order if isinstance(order, np.ndarray) else np.arange(size)) + start
            for order, size, start in zip(given, sizes, starts, strict=False)
        ]
        return np.concatenate(own)
    return unknown or part.name
