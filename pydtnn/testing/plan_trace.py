"""What each layer of a partitioned network computes in a step, and the first that is wrong.

A layer's output on a rank is a part of an array of the network, or a term of a sum over ranks. It
is compared with the array of the layer of the same name in serial training; the output of an
exchange is the array of the layer before it in another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.kernels import Deferred
from pydtnn.layers.exchange import SAMPLES, Exchange, Spread
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut
from pydtnn.layers.stripes import HaloExchange
from pydtnn.model import Model
from pydtnn.utils.split import even_cut

LEAST = 1e-6
"""Magnitude of arrays whose values are zero but for rounding, relative to the largest array."""


@dataclass
class Traced:
    """A rank's array of a node.

    Attributes
    ----------
    node : str
    of : str
        The layer of the network whose output it is.
    what : str
        "output" or "gradient".
    array : ndarray
    index : tuple of slice
        Its place in the array of the network.
    partial : tuple of str
        Axes of the mesh over which it is summed.
    readers : tuple of str
        The layers of the network that read the output.
    relu : bool
        Whether a ReLU was fused into the layer.
    """

    node: str
    of: str
    what: str
    array: np.ndarray
    index: tuple[slice, ...]
    partial: tuple[str, ...]
    readers: tuple[str, ...]
    relu: bool

    def expected(self, whole: np.ndarray) -> np.ndarray:
        """Return the part of the array of the network that this one should be."""
        part = whole[self.index]
        return np.maximum(part, 0) if self.relu else part


class Trace:
    """Records of a model's nodes in one step.

    Parameters
    ----------
    model : Model
    rows : slice
        This rank's samples of the batch.

    Attributes
    ----------
    records : list of Traced
        In the order in which they were computed.
    done : bool
        Whether the step is over.
    """

    def __init__(self, model: Model, rows: slice) -> None:
        self.model, self.rows = model, rows
        self.records: list[Traced] = []
        self.done = False

    def after_node(self, position: Mapping[str, int]) -> Callable[[Node, Any], None]:
        """Return the function that records each node's output."""

        def record(node: Node, y: Any) -> None:
            if not (isinstance(node.layer, FusedConv2d) and node.layer.constant):
                self._add(node, "output", y, position)

        return record

    def record_inputs(self, xs: Sequence[Any], position: Mapping[str, int]) -> None:
        """Record the inputs of the model."""
        for node, x in zip(self.model.graph.inputs, xs, strict=True):
            self._add(node, "output", x, position)

    def record_gradients(self, position: Mapping[str, int]) -> None:
        """Record the gradients of outputs from now on, except those of and for fused layers."""
        for node in self.model.graph.nodes:
            kinds = Exchange | HaloExchange | NormAddReLU | FusedConv2d
            if node.index in self.model.graph.trained and not isinstance(node.layer, kinds):
                self._watch(node, position)

    def _watch(self, node: Node, position: Mapping[str, int]) -> None:
        layer: Any = node.layer

        def watched(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(dy: Any, *args: Any, **keywords: Any) -> Any:
                if not (self.done or isinstance(dy, Deferred) or dy is None):
                    self._add(node, "gradient", dy, position)
                return method(dy, *args, **keywords)

            return call

        for name in ("backward", "backward_steps"):
            if hasattr(layer, name):
                setattr(layer, name, watched(getattr(layer, name)))

    def _add(self, node: Node, what: str, array: Any, position: Mapping[str, int]) -> None:
        of, relu = _origin(node)
        self.records.append(
            Traced(
                node=node.name,
                of=of,
                what=what,
                array=self.model.backend.to_numpy(array).copy(),
                index=self._index(node, position),
                partial=_partial(node) if what == "output" else (),
                readers=tuple(_readers(node)),
                relu=relu and what == "output",
            )
        )

    def _index(self, node: Node, position: Mapping[str, int]) -> tuple[slice, ...]:
        ranges = _ranges(node, position)
        index = [self.rows, *(slice(*ranges.get(d, (None, None))) for d in range(len(node.shape)))]
        mesh = self.model.mesh
        for axis, state in node.layout.items():
            if mesh is not None and isinstance(state, Cut) and state.dim == SAMPLES:
                count, first = self.rows.stop - self.rows.start, self.rows.start
                ranks, place = mesh.shape[axis], position[axis]
                own = (first + even_cut(count, ranks, p) for p in (place, place + 1))
                index[0] = slice(*own)
        return tuple(index)


def _ranges(node: Node, position: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """Return the rows, columns and channels of a node's array, by the axis of a sample."""
    if isinstance(node.layer, HaloExchange):
        halo = node.layer.halo
        return _ranges(node.inputs[0], position) | {halo.cut.dim: halo.needed}
    cuts = [c for c in node.layout.values() if isinstance(c, Cut) and c.dim != SAMPLES]
    return {c.dim: (c.range(position).start, c.range(position).stop) for c in cuts}


def _partial(node: Node) -> tuple[str, ...]:
    """Return the axes along which a node's arrays add up to that of the network."""
    if isinstance(node.layer, Exchange | HaloExchange):  # a layout it is for may say "partial"
        own = getattr(node.layer, "axis", None)
        return tuple(axis for axis in _partial(node.inputs[0]) if axis != own)
    return tuple(axis for axis, state in node.layout.items() if state is Spread.PARTIAL)


def _origin(node: Node) -> tuple[str, bool]:
    """Return the layer whose output a node has, and whether a ReLU was fused into it."""
    layer = node.layer
    if isinstance(layer, Exchange | HaloExchange):
        return _origin(node.inputs[0])
    if isinstance(layer, NormAddReLU):
        return str(layer.parts[-1].name), False
    return node.name, isinstance(layer, FusedConv2d) and layer.relu


def _readers(node: Node) -> list[str]:
    names: list[str] = []
    for reader in node.consumers:
        passes = isinstance(reader.layer, Exchange | HaloExchange)
        names += _readers(reader) if passes else [reader.name]
    return names


class Wrong:
    """The first node that is wrong.

    Attributes
    ----------
    node, what : str
        See `Traced`.
    difference : float
        The largest, relative to the largest magnitude of the whole array.
    readers : tuple of str
    """

    def __init__(self, one: Traced, difference: float) -> None:
        self.node, self.what, self.readers = one.node, one.what, one.readers
        self.difference = difference


def first_wrong(
    serial: Sequence[Traced],
    ranks: Sequence[tuple[Mapping[str, int], Sequence[Traced]]],
    tolerance: float,
) -> Wrong | None:
    """Return the first node whose array is not that of serial training, if there is one.

    Parameters
    ----------
    serial : sequence of Traced
        Of a model that is not fused.
    ranks : sequence of (mapping, sequence of Traced)
        Each rank's position in the mesh, and its records.
    tolerance : float
    """
    whole = {(one.of, one.what): one.array for one in serial}
    largest = dict.fromkeys(("output", "gradient"), 0.0)
    for one in serial:
        largest[one.what] = max(largest[one.what], _most(one.array))
    named = [(where, {(one.node, one.what): one for one in records}) for where, records in ranks]
    for key, one in named[0][1].items():
        if (one.of, one.what) not in whole:
            continue
        expected = whole[one.of, one.what]
        scale = max(_most(expected), LEAST * largest[one.what])
        same = [(position, records[key]) for position, records in named if key in records]
        difference = max(_difference(own, same, expected, where) for where, own in same) / scale
        if not difference <= tolerance:
            return Wrong(one, difference)
    return None


def _difference(
    own: Traced,
    others: Sequence[tuple[Mapping[str, int], Traced]],
    whole: np.ndarray,
    position: Mapping[str, int],
) -> float:
    kept = {axis: place for axis, place in position.items() if axis not in own.partial}
    terms = [other.array for where, other in others if kept.items() <= where.items()]
    expected = own.expected(whole)
    if any(term.shape != expected.shape for term in terms):
        return np.inf
    return _most(sum(terms) - expected)


def _most(array: np.ndarray) -> float:
    worst = float(np.abs(array).max(initial=0))
    return worst if np.isfinite(worst) else np.inf
