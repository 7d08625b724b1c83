"""What each layer of a partitioned network computes in a step, and the first that is wrong.

A layer's output on a rank is a part of an array of the network, or a term of a sum over ranks. It
is compared with the array of the layer of the same name in serial training; the output of an
exchange is the array of the layer before it in another layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut
from pydtnn.model import Model
from pydtnn.model.partition.exchange import SAMPLES, Exchange, Spread
from pydtnn.model.partition.stripes import HaloExchange
from pydtnn.model.passes import Hook, Pass, Run
from pydtnn.utils.split import even_cut

MIN_SCALE = 1e-6
"""Magnitude of arrays whose values are zero but for rounding, relative to the largest array."""


@dataclass
class TracedArray:
    """A rank's array of a node.

    Attributes
    ----------
    node : str
    of : str
        The layer of the network whose output it is.
    what : str
        "output" or "gradient".
    index : tuple of slice or ndarray
        Its place in the array of the network.
    partial : tuple of str
        Axes of the mesh over which it is summed.
    readers : tuple of str
        The layers of the network that read the output.
    pieces : list of ndarray
        The array, for each part of the batch.
    """

    node: str
    of: str
    what: str
    index: tuple[Any, ...]
    partial: tuple[str, ...]
    readers: tuple[str, ...]
    pieces: list[np.ndarray] = field(default_factory=list)

    @property
    def array(self) -> np.ndarray:
        """The array for all samples."""
        return np.concatenate(self.pieces)


EXCHANGES = (Exchange, HaloExchange)
"""Layers that are not those of the network."""

Records = dict[tuple[str, str], TracedArray]
"""By node and "output" or "gradient", in the order in which they were computed."""


class StepTrace(Hook):
    """Records of the nodes of a model without fused layers, in one step.

    Parameters
    ----------
    model : Model
    rows : slice
        This rank's samples of the batch.
    position : dict of str to int
        Of the rank in the mesh.

    Attributes
    ----------
    records : dict of (str, str) to Traced
    """

    def __init__(self, model: Model, rows: slice, position: Mapping[str, int]) -> None:
        self.model, self.rows, self.position = model, rows, position
        self.records: Records = {}

    def record_inputs(self, nodes: Sequence[Node], xs: Sequence[Any]) -> None:
        """Record the inputs of a pass."""
        for node, x in zip(nodes, xs, strict=True):
            self._add(node, "output", x)

    def record_output(self, node: Node, y: Any) -> None:
        """Record the output of a node."""
        self._add(node, "output", y)

    def backward(self, run: Run) -> Run:
        """Record the gradients of outputs, except those of exchanges."""

        def recorded(node: Node, state: Any) -> Pass:
            known = node.index in state.sums and not isinstance(node.layer, EXCHANGES)
            dy = node.layer.accept(state.sums[node.index][0]) if known else None
            if dy is not None:
                self._add(node, "gradient", dy)
            return run(node, state)

        return recorded

    def _add(self, node: Node, what: str, array: Any) -> None:
        record = self.records.setdefault(
            (node.name, what),
            TracedArray(
                node=node.name,
                of=_origin(node).name,
                what=what,
                index=self._index(node),
                partial=_partial(node) if what == "output" else (),
                readers=tuple(_readers(node)),
            ),
        )
        record.pieces.append(self.model.backend.to_numpy(array).copy())

    def _index(self, node: Node) -> tuple[Any, ...]:
        ranges = _ranges(node, self.position)
        index: list[Any] = [
            self.rows,
            *(slice(*ranges.get(d, (None, None))) for d in range(len(node.shape))),
        ]
        mesh = self.model.mesh
        for axis, state in node.layout.items():
            if isinstance(state, Cut) and state.blocks > 1:
                blocks = np.arange(state.length).reshape(state.blocks, -1)
                index[state.dim + 1] = blocks[:, state.range(self.position)].reshape(-1)
            if mesh is not None and isinstance(state, Cut) and state.dim == SAMPLES:
                count, first = self.rows.stop - self.rows.start, self.rows.start
                ranks, place = mesh.shape[axis], self.position[axis]
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
    if isinstance(node.layer, EXCHANGES):  # a layout it is for may say "partial"
        own = getattr(node.layer, "axis", None)
        return tuple(axis for axis in _partial(node.inputs[0]) if axis != own)
    return tuple(axis for axis, state in node.layout.items() if state is Spread.PARTIAL)


def _origin(node: Node) -> Node:
    """Return the node of the network whose output a node has."""
    return _origin(node.inputs[0]) if isinstance(node.layer, EXCHANGES) else node


def _readers(node: Node) -> list[str]:
    names: list[str] = []
    for reader in node.consumers:
        passes = isinstance(reader.layer, EXCHANGES)
        names += _readers(reader) if passes else [reader.name]
    return names


class WrongNode(NamedTuple):
    """The first node that is wrong.

    Attributes
    ----------
    node, what : str
        See `TracedArray`.
    readers : tuple of str
        The layers that read its output in the network, which may be in another stage.
    difference : float
        The largest, relative to the largest magnitude of the array.
    """

    node: str
    what: str
    readers: tuple[str, ...]
    difference: float


def first_wrong(
    serial: Records, ranks: Sequence[tuple[Mapping[str, int], Records]], tolerance: float
) -> WrongNode | None:
    """Return the first node whose array is not that of serial training, if there is one.

    Parameters
    ----------
    serial : dict of (str, str) to Traced
        Of a model on one rank.
    ranks : sequence of (mapping, dict)
        Each rank's position in the mesh, and its records.
    tolerance : float
    """
    full = {(record.of, record.what): record.array for record in serial.values()}
    scales = dict.fromkeys(("output", "gradient"), 0.0)
    for (_, what), array in full.items():
        scales[what] = max(scales[what], largest(array))
    for key in dict.fromkeys(key for _, records in ranks for key in records):
        same = [(position, records[key]) for position, records in ranks if key in records]
        record = same[0][1]
        if (record.of, record.what) not in full:
            continue
        expected = full[record.of, record.what]
        scale = max(largest(expected), MIN_SCALE * scales[record.what])
        difference = max(_difference(own, same, expected, where) for where, own in same) / scale
        if not difference <= tolerance:
            key = record.of, record.what
            readers = next((s.readers for s in serial.values() if (s.of, s.what) == key), ())
            return WrongNode(record.node, record.what, record.readers or readers, difference)
    return None


def _difference(
    own: TracedArray,
    others: Sequence[tuple[Mapping[str, int], TracedArray]],
    full: np.ndarray,
    position: Mapping[str, int],
) -> float:
    kept = {axis: place for axis, place in position.items() if axis not in own.partial}
    terms = [other.array for where, other in others if kept.items() <= where.items()]
    expected = full[own.index]
    if any(term.shape != expected.shape for term in terms):
        return np.inf
    return largest(sum(terms) - expected)


def largest(array: np.ndarray) -> float:
    """Return the largest magnitude, infinity if it is not finite."""
    worst = float(np.abs(array).max(initial=0))
    return worst if np.isfinite(worst) else np.inf
