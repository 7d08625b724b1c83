"""The arrays of a model, and their names and layouts in PyTorch and ONNX."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from pydtnn.layers import (
    BatchNorm,
    DotProductAttention,
    GRULayer,
    LayerNorm,
    Linear,
    LSTMLayer,
    Reshape,
)
from pydtnn.layers.base import Shape
from pydtnn.model.description import NodeSpec
from pydtnn.tools.interchange.orders import (
    FILTERS,
    Order,
    feature_orders,
    flatten_order,
    order_for,
    same_order,
    shapes_by_name,
)

if TYPE_CHECKING:
    from pydtnn.model import Model

NAMES = {
    "w": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "running_variance": "running_var",
}
"""PyTorch's names of arrays; others are the same."""

RECURRENT_NAMES = {"w": "weight_ih", "u": "weight_hh", "b": "bias_ih", "b_u": "bias_hh"}
"""Those of recurrent layers, in PyTorch's order."""

RECURRENT = re.compile(rf"({'|'.join(RECURRENT_NAMES.values())})_l(\d+(?:_reverse)?)")
"""Names of their arrays in PyTorch, with the number of the layer."""

NUMBERED = re.compile(r"(?:(.*)\.)?layer(\d+)(_reverse)?")
"""Names of the layers of `pydtnn.layers.LSTM`."""

ARRAY_NAMES = ("weight", "bias", "running_mean", "running_var")
"""Their order in PyTorch."""

PROJECTION = "in_proj"
"""First projection of an attention, whose name is a prefix of its arrays in PyTorch."""


@dataclass(frozen=True, eq=False)
class ArraySlot:
    """An array of a model.

    Attributes
    ----------
    name : str
        As in `Model.state`.
    layer : str
        Dotted name of the layer.
    what : str
        PyTorch's name of the array in its module, such as "weight".
    shape, their_shape : tuple of int
        Here and in PyTorch.
    filters : bool
        Whether they are filters, ``(O, kh, kw, C)`` here and ``(O, C, kh, kw)`` in PyTorch, of one
        to three axes.
    order : ndarray, optional
        Order of the last axis, see `pydtnn.tools.interchange.orders`.
    attention : bool
        Whether it belongs to the first projection of an attention, which is no module in PyTorch:
        the arrays are "in_proj_weight" and "in_proj_bias" of the attention itself.
    published : str
        Dotted name in a published network, if it differs from that of a module whose submodules are
        named as the layers here.
    transposed : bool
        Whether it is a matrix that is transposed in a published network.
    """

    name: str
    layer: str
    what: str
    shape: Shape
    their_shape: Shape
    filters: bool = False
    order: np.ndarray | None = None
    attention: bool = False
    published: str = ""
    transposed: bool = False

    @property
    def their_name(self) -> str:
        """Dotted name in PyTorch."""
        return self.published or f"{self.layer}{'_' if self.attention else '.'}{self.what}"

    def named(self, name: str, shape: Shape, *, transposed: bool = False) -> ArraySlot:
        """Return the slot with the name and layout of a published network."""
        return replace(self, published=name, their_shape=shape, transposed=transposed)

    def renamed(self, name: str) -> ArraySlot:
        """Return the slot with another name in PyTorch."""
        return replace(self, published=name)

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Convert an array of `their_shape`."""
        if self.transposed:
            array = array.T
        if self.filters:
            return np.moveaxis(array, 1, -1)
        array = array.reshape(self.shape)  # (C, H, W) -> (C H W,), for layer norms of images
        return array if self.order is None else array[..., self.order]

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Convert an array of `shape`."""
        if self.filters:
            return np.moveaxis(array, -1, 1)
        if self.order is not None:
            array = array[..., np.argsort(self.order)]
        return array.T if self.transposed else array.reshape(self.their_shape)


def slots_of(model: Model, *, exported: bool = False) -> list[ArraySlot]:
    """Return the arrays of a model in the order of execution.

    Parameters
    ----------
    model : Model
    exported : bool
        See `feature_orders`.

    Raises
    ------
    ValueError
        If the order of a layer's inputs in other programs is not known, or not that of its arrays.
    """
    description, shapes = model.description, shapes_by_name(model.description)
    orders = feature_orders(description, exported=exported)
    first = {part.name: orders[part.inputs[0]] for part in description.parts}
    for part in description.parts:
        if part.same_as and not same_order(first[part.name], first[part.same_as]):
            raise ValueError(
                f"{part.name}: the order of its inputs in other programs must be that of "
                f"{part.same_as}, whose parameters it shares; convert the arrays by hand"
            )
    attentions = {
        f"{part.name.rpartition('.')[0]}.{PROJECTION}".lstrip(".")
        for part in description.parts
        if issubclass(part.layer.kind, DotProductAttention)
    }
    images = [  # of features that a layer computes: (C, H, W) there, and perhaps (H, W, C) here
        part.name
        for part in description.parts
        if issubclass(part.layer.kind, Reshape) and part.inputs[0] in first
        if len(shapes[part.inputs[0]]) == 1
    ]
    own: dict[str, list[str]] = {}
    for name in model.whole.shapes:
        own.setdefault(name.rpartition(".")[0], []).append(name)
    slots: list[ArraySlot] = []
    for part in description.parts:
        source = part.inputs[0]
        order = orders[source]
        if issubclass(part.layer.kind, FILTERS) and order not in images:
            order = None  # channels are the same
        made = [
            _slot(name, part, model.whole.shapes[name], shapes[source], order)
            for name in own.get(part.name, ())
        ]
        if part.name in attentions:
            made = [replace(slot, attention=True) for slot in made]
        names = (*ARRAY_NAMES, *RECURRENT_NAMES.values())
        slots += sorted(made, key=lambda slot: (*names, slot.what).index(slot.what))
    return slots


def _slot(name: str, part: NodeSpec, shape: Shape, image: Shape, order: Order) -> ArraySlot:
    """Return the slot of an array of a layer whose input has a shape and an order."""
    kind, what = part.layer.kind, name.rpartition(".")[2]
    if issubclass(kind, LSTMLayer | GRULayer):
        order = order_for(order, part.name) if what == "w" else None
        slot = ArraySlot(name, part.name, RECURRENT_NAMES[what], shape, shape, order=order)
        return slot.renamed(_numbered(part.name, slot.what))
    theirs = NAMES.get(what, what)
    if issubclass(kind, FILTERS) and what == "w":
        order_for(order, part.name)
        own = (shape[0], shape[-1], *shape[1:-1])  # (O, kh, kw, C) -> (O, C, kh, kw)
        return ArraySlot(name, part.name, theirs, shape, own, filters=True)
    if issubclass(kind, Linear) and what == "b":
        return ArraySlot(name, part.name, theirs, shape, shape)
    if issubclass(kind, LayerNorm) and len(image) >= 3 and shape == (prod(image),):
        their_shape = (image[-1], *image[:-1])
        return ArraySlot(name, part.name, theirs, shape, their_shape, order=flatten_order(image))
    reads = issubclass(kind, Linear | BatchNorm | LayerNorm)
    order = order_for(order if reads or order is None else part.inputs[0], part.name)
    return ArraySlot(name, part.name, theirs, shape, shape, order=order)


def _numbered(layer: str, what: str) -> str:
    """Return the name of an array of a recurrent layer, which has a number in PyTorch's module.

    >>> _numbered("encoder.layer1_reverse", "weight_hh")
    'encoder.weight_hh_l1_reverse'
    """
    found = NUMBERED.fullmatch(layer)
    if found is None:  # a layer by itself
        return f"{layer}.{what}_l0"
    outer, number, reverse = found.groups(default="")
    return f"{outer}.{what}_l{number}{reverse}".lstrip(".")
