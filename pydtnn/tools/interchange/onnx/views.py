"""Values of an ONNX graph as views of the arrays of a model.

Operators such as Transpose, Reshape and Flatten only change how ONNX counts the elements of an
array. They add no layer: a `Value` is an array of the model, and for each axis of ONNX the parts of
that array's axes of which it consists. An image (N, C, H, W) is a view of an array (N, H, W, C).
Only where a layer requires another order in memory is the array transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from pydtnn.layers import Embedding, Flatten, Layer, Rescale, Reshape, Slice, Transpose
from pydtnn.layers.base import Shape
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.initializers import get_initializer
from pydtnn.layers.node import Node
from pydtnn.tools.interchange.onnx.functions import decimal
from pydtnn.tools.interchange.onnx.graph import ANY_BATCH, MAX_ELEMENTS, Names


class Atom:
    """A part of an axis of an array, which no view divides further so far.

    Attributes
    ----------
    size : int
        Above 1, but for a batch of 1, which is not part of any axis.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"<{self.size}>"


Atoms = tuple[Atom, ...]


def size_of(atoms: Iterable[Atom]) -> int:
    """Return the number of elements along atoms."""
    return prod(atom.size for atom in atoms)


def atoms_of(size: int) -> Atoms:
    """Return the atom of an axis; none for a size of 1."""
    return (Atom(size),) if size > 1 else ()


def axis_of_batch(batch: Atom) -> Atoms:
    """Return the axis of a batch, see `Value.batch_axis`."""
    return (batch,) if batch.size > 1 else ()


class ModelArray:
    """An array of the model; its layer is added when it is read.

    Attributes
    ----------
    whole : Source or None
        The array of which this one is a part along the last axis, from `start`.
    """

    def __init__(self, make: Callable[[], Node] | Node) -> None:
        self._make = make
        self.whole: ModelArray | None = None
        self.start = 0

    @property
    def node(self) -> Node:
        """The node of the model's graph."""
        if not isinstance(self._make, Node):
            self._make = self._make()
        return self._make


@dataclass(frozen=True, eq=False)
class Value:
    """A value of an ONNX graph.

    Attributes
    ----------
    source : Source
    atoms : tuple of Atom
        Of the array in memory, without the batch.
    axes : tuple of tuple of Atom
        For each axis of ONNX, from the outermost; none for a size of 1.
    batch : Atom
    name : str
        Of the node that has made the view, for the layers that it requires.
    factor : float
        By which all elements are to be multiplied, for which there is no layer yet.
    integer : bool
        Whether elements are integers: tokens.
    """

    source: ModelArray
    atoms: Atoms
    axes: tuple[Atoms, ...]
    batch: Atom
    name: str
    factor: float = 1.0
    integer: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in ONNX; see `ANY_BATCH`."""
        return tuple(map(size_of, self.axes))

    @property
    def batch_axis(self) -> Atoms:
        """An axis of the batch alone; that of a batch of 1 has no atom, as other sizes of 1."""
        return axis_of_batch(self.batch)

    def axis(self, axis: int) -> int:
        """Return an axis that counts from the front; ValueError if it does not exist."""
        rank = len(self.axes)
        if not -rank <= axis < rank:
            raise ValueError(f"axis must exist in an input of {rank} axes, got {axis}")
        return axis % rank

    def sample_axis(self, axis: int) -> int:
        """Return an axis that is not that of the batch; ValueError for others."""
        place = self.axis(axis)
        if self.batch in self.axes[place] or (place == 0 and self.axes[0] == self.batch_axis):
            raise ValueError(f"the axis must not be that of the batch, got {axis}")
        return place

    def check_samples(self) -> None:
        """Raise ValueError if the first axis is not that of the batch alone."""
        if self.axes[:1] != (self.batch_axis,):
            raise ValueError(
                f"the first axis must be that of the batch, got an input of shape {self.given}"
            )

    @property
    def given(self) -> str:
        """The shape in ONNX, for errors."""
        sizes = [
            "N" if self.batch in axis and size == ANY_BATCH else f"{size}"
            for size, axis in zip(self.shape, self.axes, strict=True)
        ]
        return f"({', '.join(sizes)})".replace(str(ANY_BATCH), "N")

    # -- views

    def transposed(self, perm: Sequence[int]) -> Value:
        """Return a view with the axes in another order."""
        if sorted(perm) != [*range(len(self.axes))]:
            raise ValueError(f"perm must be an order of the axes of {self.given}, got {perm}")
        return replace(self, axes=tuple(self.axes[axis] for axis in perm))

    def split(self, atom: Atom, outer: int) -> tuple[Value, Atom, Atom]:
        """Divide an atom into `outer` parts; return the view, and the two atoms that replace it."""
        assert atom is not self.batch
        assert atom.size % outer == 0
        pair = Atom(outer), Atom(atom.size // outer)

        def divided(atoms: Atoms) -> Atoms:
            at = [atoms.index(atom)] if atom in atoms else []
            return (*atoms[: at[0]], *pair, *atoms[at[0] + 1 :]) if at else atoms

        view = replace(self, atoms=divided(self.atoms), axes=tuple(map(divided, self.axes)))
        return view, *pair

    def reshaped(self, target: Sequence[int]) -> Value | None:
        """Return a view of another shape, whose sizes have no -1; None if there is none."""
        view, rest = self, [atom for axis in self.axes for atom in axis]
        axes: list[Atoms] = []
        for size in target:
            atoms: list[Atom] = []
            while size_of(atoms) < size:
                if not rest:
                    return None
                atom, need = rest.pop(0), size // size_of(atoms)
                if size % (size_of(atoms) * atom.size):
                    if atom is self.batch or need < 1 or atom.size % need or need == 1:
                        return None
                    view, atom, inner = view.split(atom, need)
                    rest.insert(0, inner)
                atoms.append(atom)
            if size_of(atoms) != size:
                return None
            axes.append(tuple(atoms))
        return None if rest else replace(view, axes=tuple(axes))


class Wiring:
    """The model's graph under construction.

    Parameters
    ----------
    graph : Graph
    inputs : sequence of Node
    reserved : iterable of str
        Names of nodes of ONNX.

    Attributes
    ----------
    arrays : dict of str to ndarray
        Parameters and running statistics, by their names in the model.
    tied : dict of str to Embedding
        Layers whose matrix has further readers, by the matrix's name in ONNX.
    transposed : dict of str to str
        Constants that are another one's transpose.
    reads : tuple of str
        Constants of the node that is read, of which equal layers are one.
    """

    def __init__(
        self, graph: GraphBuilder, inputs: Sequence[Node], reserved: Iterable[str]
    ) -> None:
        self.graph = graph
        self.arrays: dict[str, np.ndarray] = {}
        self.tied: dict[str, Embedding] = {}
        self.transposed: dict[str, str] = {}
        self.reads: tuple[str, ...] = ()
        self._of_reads: dict[Any, list[tuple[Layer, Mapping[str, np.ndarray]]]] = {}
        self._names = Names(reserved, (part.name for part in inputs))
        self._arranged: dict[Any, Node] = {}

    def add(
        self, name: str, layer: Layer, *nodes: Node, arrays: Mapping[str, np.ndarray] | None = None
    ) -> Node:
        """Add a layer, with its parameters and statistics by their names in the layer.

        Raises
        ------
        ValueError
            If the layer does not fit its inputs, or the arrays do not fit the layer.
        """
        if arrays and self.reads and not layer.bound:
            layer = self._shared(layer, arrays)
        if not layer.bound:
            layer.name = self._names.free(name)
        node = self.graph.add(layer, *nodes)
        if prod(node.shape) > MAX_ELEMENTS:
            raise ValueError(
                f"{name}: outputs of samples must have at most {MAX_ELEMENTS} elements, got "
                f"{node.shape}"
            )
        if node.layer is not layer:  # another use of a layer shares its arrays
            self._names.free(node.name)
            return node
        for p in layer.parameters:
            array = (arrays or {})[p.name.rpartition(".")[2]]
            if array.shape != p.shape:  # before memory is allocated
                raise ValueError(f"{p.name} must have shape {p.shape}, got {array.shape}")
            p.initializer = get_initializer("zeros")
            self.arrays[p.name] = array
        for statistic in layer.statistics:
            for what in ("running_mean", "running_variance"):
                array, full = (arrays or {})[what], f"{statistic.name}.{what}"
                if array.shape != (statistic.channels,):
                    expected = (statistic.channels,)
                    raise ValueError(f"{full} must have shape {expected}, got {array.shape}")
                self.arrays[full] = array
        return node

    def _shared(self, layer: Layer, arrays: Mapping[str, np.ndarray]) -> Layer:
        """Return the layer with these options and arrays that there is, or the given one.

        A further use of a batch norm would not update its running statistics.
        """
        others = self._of_reads.setdefault((self.reads, repr(layer)), [])
        for other, given in others:
            if all(np.array_equal(given[name], array) for name, array in arrays.items()):
                return layer if other.statistics else other
        others.append((layer, arrays))
        return layer

    # -- views of outputs

    def image(self, node: Node, batch: Atom, name: str) -> Value:
        """Return the value (N, C, ...) of an array whose last axis are the channels."""
        *size, channels = map(atoms_of, node.shape)
        atoms = tuple(atom for axis in (*size, channels) for atom in axis)
        axes = (axis_of_batch(batch), channels, *size)
        return Value(ModelArray(node), atoms, axes, batch, name)

    def features(self, node: Node, x: Value, before: Atoms, axes: tuple[Atoms, ...]) -> Value:
        """Return the value whose last axis is the last one of a node.

        Parameters
        ----------
        node : Node
        x : Value
            The input.
        before : tuple of Atom
            Of the array without its last axis.
        axes : tuple of tuple of Atom
            Of ONNX, without the last one.
        """
        last = atoms_of(node.shape[-1])
        return Value(ModelArray(node), (*before, *last), (*axes, last), x.batch, x.name)

    def in_order(self, node: Node, x: Value, shape: Shape | None = None) -> Value:
        """Return the value of an array in the order of ONNX, with an atom for each axis.

        Parameters
        ----------
        node : Node
        x : Value
            The input, whose first axis is that of the batch.
        shape : tuple of int, optional
            Of a sample in ONNX; by default that of the node.
        """
        axes = tuple(map(atoms_of, node.shape if shape is None else shape))
        atoms = tuple(atom for axis in axes for atom in axis)
        return replace(x, source=ModelArray(node), atoms=atoms, axes=(x.axes[0], *axes))

    # -- arrays in memory

    def reshape(self, node: Node, shape: Shape, name: str) -> Node:
        """Return a node, or its output in another shape."""
        if node.shape == shape:
            return node
        key = (node.index, shape)
        if key not in self._arranged:
            layer = Flatten() if len(shape) == 1 else Reshape(shape)
            self._arranged[key] = self.add(name, layer, node)
        return self._arranged[key]

    def arrange(self, x: Value, order: Sequence[Atom], shape: Shape) -> Node:
        """Return a node with the atoms of a value in an order in memory, and a shape."""
        node, name = x.source.node, x.name
        if x.atoms == tuple(order):
            return self.reshape(node, shape, name)
        place = {atom: i for i, atom in enumerate(order)}
        runs: list[list[Atom]] = []  # atoms that stay neighbours
        for atom in x.atoms:
            if runs and place[atom] == place[runs[-1][-1]] + 1:
                runs[-1].append(atom)
            else:
                runs.append([atom])
        axes = tuple(sorted(range(len(runs)), key=lambda i: place[runs[i][0]]))
        node = self.reshape(node, tuple(map(size_of, runs)), f"{name}.parts")
        key = (node.index, axes)
        if key not in self._arranged:
            self._arranged[key] = self.add(f"{name}.transpose", Transpose(axes), node)
        return self.reshape(self._arranged[key], shape, name)

    def solid(self, x: Value) -> Value:
        """Return a value whose factor, if it has one, is that of a layer, which is added once."""
        if x.factor == 1:
            return x
        node = x.source.node
        key = (node.index, x.factor)
        if key not in self._arranged:
            self._arranged[key] = self.add(x.name, Rescale(decimal(x.factor)), node)
        return replace(x, source=ModelArray(self._arranged[key]), factor=1.0)

    def plain(self, x: Value) -> Value:
        """Return a value whose array has the order of ONNX, and an atom for each axis."""
        x.check_samples()
        sample = x.axes[1:]
        shape = tuple(map(size_of, sample))
        node = self.arrange(x, [atom for axis in sample for atom in axis], shape or (1,))
        return self.in_order(node, x, shape)

    def channels_last(self, x: Value, *, any_order: bool = False) -> tuple[Node, np.ndarray | None]:
        """Return an image or volume (N, C, ...) in an array (N, ..., C).

        Parameters
        ----------
        x : Value
        any_order : bool
            Whether the channels may be in another order.

        Returns
        -------
        node : Node
        order : ndarray or None
            Channel i of the array is channel ``order[i]`` of the value, if the order is another.
        """
        x.check_samples()
        if len(x.axes) < 3:
            raise ValueError(f"expected an image (N, C, H, W), got an input of shape {x.given}")
        _, channels, *size = x.axes
        spatial = [atom for axis in size for atom in axis]
        shape = (*map(size_of, size), size_of(channels))
        if any_order and x.atoms[: len(spatial)] == tuple(spatial):
            tail = x.atoms[len(spatial) :]
            return self.reshape(x.source.node, shape, x.name), _order(channels, tail)
        return self.arrange(x, [*spatial, *channels], shape), None

    def last(
        self, x: Value, wanted: Sequence[Atom], *, any_order: bool = True
    ) -> tuple[Node, Atoms, np.ndarray | None]:
        """Return an array whose last axis consists of atoms.

        Parameters
        ----------
        x : Value
        wanted : sequence of Atom
            In the order of ONNX; not the batch.
        any_order : bool
            Whether they may be in another order.

        Returns
        -------
        node : Node
        atoms : tuple of Atom
            Of the array.
        order : ndarray or None
            As of `channels_last`.
        """
        cut, size = len(x.atoms) - len(wanted), size_of(wanted)
        tail = x.atoms[cut:]
        if {*tail} == {*wanted} and (any_order or tail == tuple(wanted)):
            atoms = x.atoms
        else:
            others = tuple(atom for atom in x.atoms if atom not in wanted)
            atoms, tail = (*others, *wanted), tuple(wanted)
        before = size_of(atoms[: len(atoms) - len(wanted)])
        node = x.source.node
        if atoms == x.atoms and node.shape[-1] == size:
            return node, atoms, _order(wanted, tail)
        shape = (size,) if before == 1 else (before, size)
        return self.arrange(x, atoms, shape), atoms, _order(wanted, tail)

    def reshaped(self, x: Value, target: Sequence[int]) -> Value:
        """Return a value of another shape, with layers if no view is sufficient."""
        if prod(target) != prod(x.shape):
            raise ValueError(f"expected a shape of as many elements as {x.given}, got {target}")
        view = x.reshaped(target)
        if view is None:
            x = self.plain(x)
            one = Atom(size_of(x.atoms))
            view = replace(x, atoms=(one,), axes=(x.batch_axis, (one,))).reshaped(target)
        if view is None:
            raise ValueError(f"the samples of {x.given} must stay apart, got the shape {target}")
        return view

    def part(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Return a part of a value along an axis of samples."""
        size = x.shape[axis]
        if (start, stop, step) == (0, size, 1):
            return x
        count = len(range(start, stop, step))
        if count < 1 or step < 1:
            raise ValueError(
                f"expected a part of the axis of size {size} and a positive step, got "
                f"{start}:{stop}:{step}"
            )
        outer, *inner = x.axes[axis]
        if inner:  # whole rows of the first atom, if that is possible
            row = size_of(inner)
            if step == 1 and start % row == 0 and stop % row == 0:
                start, stop = start // row, stop // row
            else:
                x = self.plain(x)
                (outer,), inner = x.axes[axis], []
            count = len(range(start, stop, step))
        at = x.atoms.index(outer)
        made = (Atom(count),) if count > 1 else ()
        source = self._slice(x, at, slice(start, stop, step))
        return replace(
            x,
            source=source,
            atoms=(*x.atoms[:at], *made, *x.atoms[at + 1 :]),
            axes=tuple((*made, *inner) if i == axis else other for i, other in enumerate(x.axes)),
        )

    def _slice(self, x: Value, at: int, cut: slice) -> ModelArray:
        """Return the part of an array along an atom; the layer is added when it is read."""
        before, size = size_of(x.atoms[:at]), x.atoms[at].size
        after, name, source = size_of(x.atoms[at + 1 :]), x.name, x.source

        def make() -> Node:
            node, scale = source.node, 1
            for axis, n in enumerate(node.shape):
                if prod(node.shape[:axis]) == before and n % size == 0:
                    scale = n // size  # the atom is the outer part of an axis
                    if scale == 1 or cut.step == 1:
                        break
            else:
                shape = (before, size, after)
                node, axis, scale = self.reshape(node, shape, f"{name}.parts"), 1, 1
            scaled = slice(cut.start * scale, cut.stop * scale, cut.step)
            return self.add(name, Slice(*[slice(None)] * axis, scaled), node)

        made = ModelArray(make)
        if cut.step == 1 and before * size * after == prod(source.node.shape):
            *_, last = source.node.shape
            if before * last == prod(source.node.shape):
                made.whole, made.start = source, cut.start * after
        return made

    def aligned(self, a: Value, b: Value) -> tuple[Value, Node, Node]:
        """Return two values of the same shape as arrays of the same shape and order."""
        if a.shape != b.shape:
            raise ValueError(f"inputs must have the same shape, got {a.given} and {b.given}")
        x, y = a, b
        pairs: dict[Atom, Atom] = {}
        for axis in range(len(a.axes)):
            found = _common(x, y, axis)
            if found is None:
                x, y = self.plain(a), self.plain(b)
                pairs = dict(zip(x.atoms, y.atoms, strict=True))
                break
            x, y = found
            pairs.update(zip(x.axes[axis], y.axes[axis], strict=True))
        order = [pairs[atom] for atom in x.atoms]
        node = x.source.node
        return x, node, self.arrange(y, order, node.shape)


def _order(wanted: Sequence[Atom], tail: Sequence[Atom]) -> np.ndarray | None:
    """Return the place in `wanted` of each element of `tail`; None if they are the same."""
    if tuple(wanted) == tuple(tail):
        return None
    grid = np.arange(size_of(wanted)).reshape([atom.size for atom in wanted])
    return grid.transpose([[*wanted].index(atom) for atom in tail]).ravel()


def _common(a: Value, b: Value, axis: int) -> tuple[Value, Value] | None:
    """Divide the atoms of an axis of two values so that their sizes are equal, if possible."""
    i = 0
    while i < len(a.axes[axis]) and i < len(b.axes[axis]):
        x, y = a.axes[axis][i], b.axes[axis][i]
        if (x is a.batch) != (y is b.batch):
            return None
        if x.size > y.size and x.size % y.size == 0:
            a, *_ = a.split(x, y.size)
        elif y.size > x.size and y.size % x.size == 0:
            b, *_ = b.split(y, x.size)
        elif x.size != y.size:
            return None
        i += 1
    return (a, b) if len(a.axes[axis]) == len(b.axes[axis]) else None
