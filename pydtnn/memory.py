"""How much memory a training step will take, from what the layers declare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydtnn.graph import Node
    from pydtnn.model import Model


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on one rank, without the slots of its optimizer.

    Attributes
    ----------
    parameters, gradients : int
        The flat arrays, padding included.
    kept : tuple of int
        For each node of the graph, what its backward keeps alive that no earlier node's does. The
        sum is what forward leaves behind; the batch is part of it if a layer keeps it.
    peak : int
        The most that is alive at one time: parameters, gradients, the batch and all arrays of the
        loops.
    """

    parameters: int
    gradients: int
    kept: tuple[int, ...]
    peak: int


def forecast_memory(model: Model, batch: int) -> Memory:
    """Go through a step as `Model` does, with sizes in the place of arrays.

    Parameters
    ----------
    model : Model
    batch : int
        Samples per rank.

    Returns
    -------
    Memory
        Exact for layers that declare what they do; one that says nothing is taken to need new
        memory for every result. Scratch memory of kernels counts as far as layers declare it.
    """
    parameters = sum(buffer.values.nbytes for buffer in model.buffers)
    gradients = sum(buffer.grads.nbytes for buffer in model.buffers)
    step = _Step(model, batch)
    step.run()
    peak = parameters + gradients + step.arrays.peak
    return Memory(parameters, gradients, tuple(step.kept), peak)


class _Arrays:
    """Arrays by number: each has a size and a count of its holders."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.holders: Counter[int] = Counter()
        self.alive = self.peak = 0

    def new(self, size: int) -> int:
        """Allocate an array for one holder; return its number."""
        self.sizes.append(size)
        return self.hold(len(self.sizes) - 1)

    def hold(self, array: int) -> int:
        """Add a holder."""
        if not self.holders[array]:
            self.alive += self.sizes[array]
            self.note()
        self.holders[array] += 1
        return array

    def drop(self, arrays: Iterable[int]) -> None:
        """Take one holder from each; without holders an array is freed."""
        for array in arrays:
            self.holders[array] -= 1
            if not self.holders[array]:
                self.alive -= self.sizes[array]

    def note(self, scratch: int = 0) -> None:
        """Remember the memory in use if it is the most so far."""
        self.peak = max(self.peak, self.alive + scratch)


class _Step:
    """The loops of `Model.forward` and `Model.backward`; the caller holds the batch and dy."""

    def __init__(self, model: Model, batch: int) -> None:
        self.graph = model.graph
        self.batch = batch
        self.itemsize = model.dtype.itemsize
        self.arrays = _Arrays()
        self.residuals: list[list[int]] = [[] for _ in self.graph.nodes]
        self.kept = [0] * len(self.graph.nodes)
        self.counted: set[int] = set()
        self.sums: dict[Node, tuple[int, bool]] = {}

    def run(self) -> None:
        arrays, graph = self.arrays, self.graph
        first = len(graph.inputs)
        values = [arrays.hold(self.new(node)) for node in graph.inputs]
        for node in graph.nodes[first:]:
            values.append(self.forward(node, [values[i.index] for i in node.inputs]))
            arrays.drop(values[index] for index in node.releases)
        for node in graph.outputs:
            self.add(node, arrays.hold(self.new(node)), new=False)
        arrays.drop(values[node.index] for node in graph.outputs)
        for node in reversed(graph.nodes[first:]):
            self.backward(node)

    def new(self, node: Node) -> int:
        return self.arrays.new(self.batch * prod(node.shape) * self.itemsize)

    def forward(self, node: Node, xs: list[int]) -> int:
        arrays, layer = self.arrays, node.layer
        passes = layer.overwrites_input or "output" in layer.views
        y = arrays.hold(xs[0]) if passes else self.new(node)
        saved = [arrays.new(layer.saved_bytes(self.batch))]
        saved += [arrays.hold(x) for x in xs if "input" in layer.saves]
        if "output" in layer.saves:
            saved.append(arrays.hold(y))
        arrays.note(layer.scratch(self.batch))
        if node.index in self.graph.trained:
            self.residuals[node.index] = saved
            self.kept[node.index] = sum(arrays.sizes[a] for a in {*saved} - self.counted)
            self.counted.update(saved)
        else:
            arrays.drop(saved)
        return y

    def backward(self, node: Node) -> None:
        arrays, layer = self.arrays, node.layer
        if node not in self.sums:
            return
        dy, _ = self.sums.pop(node)
        passes = layer.overwrites_dy or "gradient" in layer.views
        sources = node.inputs if layer.needs_dx else ()
        dxs = [arrays.hold(dy) if passes else self.new(source) for source in sources]
        arrays.note(layer.scratch(self.batch))
        for source, dx in zip(sources, dxs, strict=True):
            if source.index in self.graph.trained:
                self.add(source, dx, new=layer.new_gradient)
            else:
                arrays.drop([dx])
        arrays.drop([dy, *self.residuals[node.index]])

    def add(self, node: Node, dx: int, *, new: bool) -> None:
        if node in self.sums:
            so_far, own = self.sums[node]
            total = self.arrays.hold(so_far if own else dx) if own or new else self.new(node)
            self.arrays.drop([so_far, dx])
            dx, new = total, True
        self.sums[node] = dx, new
