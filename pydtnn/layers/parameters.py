"""Parameters and the flat arrays that store them.

All values, and all gradients, of a model are two flat arrays, bucket by bucket in the order in
which backward completes the gradients. A parameter's `value` and `grad` are views. A layer's matrix
product therefore writes directly into the message that the ranks exchange, an optimizer updates
whole ranges at once, and "this bucket is ready" is one comparison of integers.

A model with 16-bit activations computes matrix products with 16-bit copies of its matrices. The
values themselves, the *master weights*, are float32: the update of a step is smaller than the
resolution of 16 bits (Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.number_format import Rounding
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.collectives import contiguous
from pydtnn.layers.initializers import Initializer, generator
from pydtnn.utils.names import SuggestsNames


@dataclass(frozen=True)
class Cut:
    """An axis of an array that is cut into consecutive parts, one for each rank along an axis.

    Parameters
    ----------
    dim : int
        Axis of the array.
    axis : str
        Axis of the mesh.
    bounds : tuple of int
        The rank at position r has elements ``bounds[r]`` to ``bounds[r + 1]``, of each block.
    blocks : int
        Blocks of equal length of which the axis consists, and each of which is cut: 3 for the
        queries, keys and values of heads.
    """

    dim: int
    axis: str
    bounds: tuple[int, ...]
    blocks: int = 1

    @property
    def length(self) -> int:
        """Number of elements of all ranks."""
        return self.blocks * self.bounds[-1]

    def range(self, position: Mapping[str, int]) -> slice:
        """Return the elements, of a block, of the rank at a position in the mesh."""
        place = position[self.axis]
        return slice(self.bounds[place], self.bounds[place + 1])

    def size(self, position: Mapping[str, int]) -> int:
        """Return the number of elements of the rank at a position in the mesh."""
        own = self.range(position)
        return self.blocks * (own.stop - own.start)


@dataclass(frozen=True)
class ParameterPart:
    """The part of an array that each rank of a mesh stores.

    Parameters
    ----------
    shape : tuple of int
        Shape of the whole array.
    cuts : tuple of Cut
        Axes that are cut, each along another axis of the mesh.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which ranks have different parts, in alphabetical order."""
        return tuple(sorted(cut.axis for cut in self.cuts))

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the whole array, with two axes for each one that is cut in blocks."""
        shape: list[int] = []
        blocks = {cut.dim: cut.blocks for cut in self.cuts}
        for dim, size in enumerate(self.shape):
            count = blocks.get(dim, 1)
            shape += [size] if count == 1 else [count, size // count]
        return tuple(shape)

    @property
    def grid_cuts(self) -> tuple[Cut, ...]:
        """The cuts, with axes counted in `grid`."""
        blocked = [cut.dim for cut in self.cuts if cut.blocks > 1]
        return tuple(
            Cut(cut.dim + sum(dim <= cut.dim for dim in blocked), cut.axis, cut.bounds)
            for cut in self.cuts
        )

    def index(self, position: Mapping[str, int]) -> tuple[slice, ...]:
        """Return the elements of `grid` of the rank at a position."""
        index = [slice(None)] * len(self.grid)
        for cut in self.grid_cuts:
            index[cut.dim] = cut.range(position)
        return tuple(index)

    def take(self, whole: Array, position: Mapping[str, int]) -> Array:
        """Return a copy of the part of the rank at a position, from the whole array."""
        part = whole.reshape(self.grid)[self.index(position)]
        return part.copy().reshape(self.local_shape(position))

    def local_shape(self, position: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the part of the rank at a position."""
        return _cut_shape(self.shape, self.cuts, position)

    def gather(
        self, own: Array, position: Mapping[str, int], gather: Callable[[Array, Cut], Array]
    ) -> Array:
        """Return the whole array.

        Parameters
        ----------
        own : Array
            This rank's part.
        position : mapping
            This rank's position in the mesh.
        gather : callable
            ``gather(array, cut)`` concatenates the parts of all ranks along the cut's axis.
        """
        cuts = self.grid_cuts
        array = contiguous(own).reshape(_cut_shape(self.grid, cuts, position))
        for cut in cuts:
            array = gather(array, cut)
        return array.reshape(self.shape)


def _cut_shape(
    shape: tuple[int, ...], cuts: Sequence[Cut], position: Mapping[str, int]
) -> tuple[int, ...]:
    part = list(shape)
    for cut in cuts:
        part[cut.dim] = cut.size(position)
    return tuple(part)


class BucketEntry(NamedTuple):
    """Position of a parameter in its bucket's flat arrays."""

    name: str
    shape: tuple[int, ...]
    slice: slice
    decay: bool
    working: bool
    form: str


ALIGNMENT = 64
"""Bytes: every parameter starts on a cache line, which is also the widest vector."""

NO_SLOT = -1

DEFAULT_BUCKET_BYTES = 1 << 20
"""Large enough that latency is negligible, small enough that the first is sent early in
backward."""


class Parameter(SuggestsNames):
    """One trainable array.

    Parameters
    ----------
    name : str
        Dotted name, unique in the model: "residual3.conv2d0.w".
    shape : tuple of int
    initializer : Initializer
    fan_in, fan_out : int
        Inputs per output and outputs per input, for the initializer.
    decay : bool
        Whether weight decay applies; it does not for biases and the parameters of norms.
    group : str
        Reduction group: parameters of one group are summed over the same ranks.
    working : bool
        Whether a 16-bit model computes with a 16-bit copy, as for matrices multiplied by
        activations.
    form : str, optional
        What the array is: a "matrix" ``(out, ...)`` that multiplies activations, as filters do, a
        "stack" ``(n, out, in)`` of them, a "table" of vectors, or numbers of another meaning, a
        "vector". By default a matrix, or without decay or with a single axis a vector.

    Attributes
    ----------
    master, grad : Array
        Views into the flat arrays, once the parameter is in a `ParameterBuffer`. Changes to a
        parameter are made in `master`. `grad` is None after a pass whose gradients are used up:
        see `ParameterBuffer.share`.
    value : Array
        The array that layers use: the 16-bit copy if there is one, otherwise `master`.
    frozen : bool
        Whether the parameter is constant; set by `Model.freeze` and `Model.thaw`.
    added : bool
        Whether a later layer of the model, whose backward runs earlier, has the same parameter, so
        that this layer's gradient is added to that of the other; set by the graph.
    part : Part or None
        The part of the network's parameter that this rank of a mesh has, if not all of it.
    position : mapping of str to int
        Position of this rank in the mesh, if there is a part.
    """

    added = False
    part: ParameterPart | None = None

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: Initializer,
        *,
        fan_in: int = 1,
        fan_out: int = 1,
        decay: bool = True,
        group: str = "data",
        working: bool = False,
        form: str | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.initializer = initializer
        self.fan_in = fan_in
        self.fan_out = fan_out
        self.decay = decay
        self.group = group
        self.working = working
        self.form = form or ("matrix" if decay and len(shape) > 1 else "vector")
        self.frozen = False
        self.position: Mapping[str, int] = {}
        self.buffer: ParameterBuffer
        self.master: Array
        self.value: Array
        self.grad: Array

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, {self.shape})"

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def source(self) -> Parameter:
        """The parameter itself; that of the first layer for a `SharedParameter`."""
        return self

    @property
    def accumulate(self) -> bool:
        """Whether this backward pass adds to `grad`; otherwise it overwrites it."""
        return self.added or self.buffer.accumulate

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained; it cannot be assigned, use `Model.freeze`."""
        return not self.frozen

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        raise cannot_assign("Parameter", "requires_grad", self.name)

    def store_grad(self, value: Array) -> None:
        """Overwrite `grad` with `value`, or add it if gradients are accumulated in this pass.

        Raises
        ------
        ValueError
            If `value` is not of the parameter's shape.
        """
        if self.frozen:
            return
        if value.shape != self.shape:
            raise ValueError(
                f"{self.name}: store_grad expected a gradient of shape {self.shape}, like the "
                f"parameter, got {value.shape}"
            )
        grad = self.grad
        if self.accumulate:
            grad += value
        else:
            grad[...] = value

    def initial_value(self, seed: int) -> np.ndarray:
        """Draw the initial value (float64): a function of the seed and the name only."""
        rng, part = generator(seed, self.name), self.part
        whole = self.initializer(self.whole_shape, self.fan_in, self.fan_out, rng)
        return whole if part is None else part.take(whole, self.position)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the parameter of the network, of which a rank may have a part."""
        return self.shape if self.part is None else self.part.shape

    def become_part(self, part: ParameterPart, position: Mapping[str, int]) -> None:
        """Make this parameter a part of a larger one of the same name, with its initial values.

        Raises
        ------
        ValueError
            If the shape is not that of the part.
        """
        if self.shape != part.local_shape(position):
            raise ValueError(
                f"{self.name}: expected a part of shape {part.local_shape(position)}, got "
                f"{self.shape}"
            )
        self.part, self.position = part, position


class SharedParameter(Parameter):
    """The parameter of another layer, in a layer that shares it.

    All attributes are those of `source`; only `added` is this layer's own.

    Parameters
    ----------
    source : Parameter
    """

    def __init__(self, source: Parameter) -> None:
        self._source = source

    @property
    def source(self) -> Parameter:
        return self._source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not yet set, as in a copy
            raise AttributeError(name)
        return getattr(self._source, name)


def cannot_assign(who: str, attribute: str, name: str) -> AttributeError:
    """Return the error for an assignment that would not stop or start the training of weights."""
    return AttributeError(
        f"{who}: {attribute} cannot be assigned; use model.freeze({name!r}) or model.thaw({name!r})"
    )


@dataclass(eq=False)
class Bucket:
    """A contiguous range of the flat arrays that is exchanged and updated as a unit.

    ``bucket.grads += x`` and ``bucket.values /= n`` change the flat arrays in place. An assigned
    array, as in ``bucket.grads = bucket.grads / n``, is copied into them. No other attribute can be
    assigned.

    Attributes
    ----------
    index : int
        Position among all buckets of the model, in the order they become ready.
    start, stop : int
        The range, in elements of the buffer's flat arrays.
    values, grads : Array
        Flat views ``[start:stop]``; padding between parameters is always zero.
    parameters : tuple of Entry
        The parameters within, with slices relative to `start`.
    ready_at : int
        Index of the graph node whose backward completes the bucket.
    group : str
        Reduction group.
    buffer : ParameterBuffer
        The buffer that contains the range.
    """

    index: int
    start: int
    stop: int
    values: Array
    grads: Array
    parameters: tuple[BucketEntry, ...]
    ready_at: int
    group: str
    buffer: ParameterBuffer

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__ and name not in self.__dict__:  # by `__init__`
            super().__setattr__(name, value)
            return
        if name not in ("values", "grads"):
            raise AttributeError(
                f"Bucket: {name} cannot be assigned; change the elements of values and grads"
            )
        array = getattr(self, name)
        if value is array:  # changed in place
            return
        if getattr(value, "shape", None) != array.shape:
            given = getattr(value, "shape", None) or type(value).__name__
            raise ValueError(
                f"Bucket: {name} must have shape {array.shape}, got {given}; fill it with "
                f"bucket.{name}[...] = value"
            )
        array[...] = value

    @property
    def stored(self) -> list[Array]:
        """The values, and their working copies if there are any."""
        working = self.buffer.working
        return [self.values] if working is None else [self.values, working[self.start : self.stop]]

    def read(self, part: slice) -> list[Array]:
        """Return what layers read of a range: values, or working copies where they have some."""
        arrays, ends = [], [*(e.slice.start for e in self.parameters[1:]), len(self.values)]
        of_entries = zip(self.parameters, ends, strict=True)
        for working, run in groupby(of_entries, key=lambda pair: pair[0].working):
            pairs = [*run]
            start = max(pairs[0][0].slice.start, part.start)
            stop = min(pairs[-1][1], part.stop)
            if start < stop:
                arrays.append(self.stored[working][start:stop])
        return arrays

    def refresh(self, part: slice) -> None:
        """Round a range of the values into the working copies, if there are any."""
        self.buffer.refresh(slice(self.start + part.start, self.start + part.stop))

    def clear(self, array: Array, kept: slice) -> None:
        """Set an array as long as the bucket to 0 outside of a range: `Backend.clear`."""
        for part in (array[: kept.start], array[kept.stop :]):
            if len(part):
                self.buffer.backend.clear(part)

    def gradients(self, slot: int) -> Array:
        """Return the bucket's range of one of the sets of gradients; 0 is `grads`."""
        return self.buffer.slots[slot][self.start : self.stop] if slot else self.grads

    def clear_padding(self) -> None:
        """Set the gradients between parameters to 0, in memory that others have used."""
        starts = [entry.slice.start for entry in self.parameters[1:]]
        for entry, start in zip(self.parameters, [*starts, len(self.grads)], strict=True):
            if entry.slice.stop < start:
                self.grads[entry.slice.stop : start] = 0


class ParameterBuffer:
    """The flat values and gradients of parameters of one dtype and reduction group.

    If parameters have a working copy of another type, there is also one flat array of that type,
    with the same layout.

    Parameters
    ----------
    parameters : sequence of (Parameter, int)
        In the order their gradients become ready, each with the index of the node that completes
        it.
    backend : Backend
    dtype : str or numpy.dtype
        Type of values and gradients.
    working : str or numpy.dtype, optional
        Type of working copies; by default `dtype`, without working copies.
    rounding : Rounding, optional
        Of working copies of the type `dtype`.
    bucket_bytes : sequence of int
        Minimum size of each bucket: one number for each of the first buckets, the last one also for
        all that follow.
    first_index : int
        Index of the first bucket.
    gradients : bool
        Whether gradients are computed; if not, they are None.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Parameter, int]],
        *,
        backend: Backend,
        dtype: Any,
        working: Any = None,
        rounding: Rounding | None = None,
        bucket_bytes: Sequence[int] = (DEFAULT_BUCKET_BYTES,),
        first_index: int = 0,
        gradients: bool = True,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.accumulate = self.shared = False
        self.places = 0
        line = ALIGNMENT // self.dtype.itemsize
        cut = _cut(parameters, bucket_bytes, self.dtype.itemsize, line)
        self.parameters = tuple(p for members, _ in cut for p in members)
        offsets = np.cumsum([0] + [_padded(p, line) for p in self.parameters]).tolist()
        self.size: int = offsets[-1]
        self.values = backend.zeros((self.size,), self.dtype)
        self.grads = backend.zeros((self.size if gradients else 0,), self.dtype)
        self.working: Array | None = None
        self.rounding = rounding
        copied = rounding is not None or (working is not None and np.dtype(working) != self.dtype)
        if copied and any(p.working for p, _ in parameters):
            self.working = backend.zeros((self.size,), np.dtype(working))
        self.slots = [self.grads]
        self.backend, self._slot = backend, NO_SLOT
        for p, offset in zip(self.parameters, offsets, strict=False):
            place = slice(offset, offset + p.size)
            p.buffer, p.grad = self, None
            p.master = p.value = self.values[place].reshape(p.shape)
            if p.working and self.working is not None:
                p.value = self.working[place].reshape(p.shape)
        self.buckets = tuple(self._buckets(cut, offsets, first_index))
        if gradients:
            self.write_to(0)

    def refresh(self, part: slice = slice(None)) -> None:
        """Round all values, or those of a range without formats, into the working copies."""
        if self.rounding is not None:
            for p in self.parameters:
                if p.value is not p.master:
                    self.rounding.apply(self.backend, p.master, out=p.value, axis=0)
        elif self.working is not None:
            self.backend.elementwise.convert(self.values[part], out=self.working[part])

    def write_to(self, slot: int) -> None:
        """Select one of several sets of gradients for backward, allocated at first use."""
        while slot >= len(self.slots):
            self.slots.append(self.backend.zeros((self.size,), self.dtype))
        if slot != self._slot:
            self._slot = slot
            own = iter(self.parameters)
            for bucket in self.buckets:
                grads = bucket.gradients(slot)
                for entry, p in zip(bucket.parameters, own, strict=False):
                    p.grad = grads[entry.slice].reshape(p.shape)

    def share(self, begins: Mapping[str, int]) -> None:
        """Put gradients of buckets that are not written at the same time into the same memory.

        For passes that use the gradients of each bucket as soon as they are complete, and never
        again (`discard`).

        Parameters
        ----------
        begins : mapping of str to int
            For each parameter, the node whose backward is the first to write its gradient.
        """
        if self.shared:
            return
        end, places = 0, list[tuple[int, int, Bucket]]()
        for bucket in self.buckets:
            first = max(begins[entry.name] for entry in bucket.parameters)
            start, length = 0, len(bucket.values)
            for low, high, other in sorted(places, key=lambda place: place[:2]):
                if other.ready_at <= first and start < high and low < start + length:
                    start = high
            places.append((start, start + length, bucket))
            end = max(end, start + length)
        self._place(end, [start for start, *_ in places], shared=True)

    def separate(self) -> None:
        """Give each bucket memory of its own for gradients again; they are 0."""
        if self.shared:
            self._place(self.size, [bucket.start for bucket in self.buckets], shared=False)

    def discard(self) -> None:
        """Set `Parameter.grad` to None until the next pass, as its memory is that of others."""
        if self._slot != NO_SLOT:
            self._slot = NO_SLOT
            for p in self.parameters:
                p.grad = None

    def _place(self, size: int, starts: Sequence[int], *, shared: bool) -> None:
        """Allocate the gradients anew, those of each bucket at a start."""
        self.discard()
        self.shared, self.places = shared, self.places + 1
        del self.grads, self.slots
        for bucket in self.buckets:
            vars(bucket)["grads"] = None
        self.grads = self.backend.zeros((size,), self.dtype)
        self.slots = [self.grads]
        for bucket, start in zip(self.buckets, starts, strict=True):
            vars(bucket)["grads"] = self.grads[start : start + len(bucket.values)]
        self.write_to(0)

    def _buckets(
        self,
        cut: Sequence[tuple[Sequence[Parameter], int]],
        offsets: list[int],
        first_index: int,
    ) -> Iterator[Bucket]:
        first = 0
        for index, (members, node) in enumerate(cut, start=first_index):
            last = first + len(members)
            start, stop = offsets[first], offsets[last]
            entries = tuple(
                BucketEntry(
                    p.name,
                    p.shape,
                    slice(o - start, o - start + p.size),
                    p.decay,
                    p.value is not p.master,
                    p.form,
                )
                for p, o in zip(members, offsets[first:last], strict=True)
            )
            yield Bucket(
                index=index,
                start=start,
                stop=stop,
                values=self.values[start:stop],
                grads=self.grads[start:stop],
                parameters=entries,
                ready_at=node,
                group=members[0].group,
                buffer=self,
            )
            first = last


def _cut(
    parameters: Sequence[tuple[Parameter, int]],
    bucket_bytes: Sequence[int],
    itemsize: int,
    line: int,
) -> list[tuple[list[Parameter], int]]:
    """Partition parameters into buckets, each with the node that completes it.

    Within a bucket those with weight decay come first: an optimizer updates consecutive parameters
    with equal decay in one call.
    """
    cut: list[tuple[list[Parameter], int]] = []
    members: list[Parameter] = []
    elements = 0
    for i, (parameter, node) in enumerate(parameters, start=1):
        members.append(parameter)
        elements += _average(parameter, line)
        least = bucket_bytes[min(len(cut), len(bucket_bytes) - 1)]
        if elements * itemsize >= least or i == len(parameters):
            cut.append((sorted(members, key=lambda p: not p.decay), node))
            members, elements = [], 0
    return cut


def _average(parameter: Parameter, line: int) -> int:
    """Number of elements with padding of an average part: buckets are alike on all ranks."""
    if parameter.part is None:
        return _padded(parameter, line)
    ranks = prod(len(cut.bounds) - 1 for cut in parameter.part.cuts)
    return -(-prod(parameter.whole_shape) // (ranks * line)) * line


def _padded(parameter: Parameter, line: int) -> int:
    """Number of elements from the start of a parameter to the start of the next."""
    return -(-parameter.size // line) * line
