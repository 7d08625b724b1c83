"""Parameters, and the flat arrays they live in.

All values, and all gradients, of a model are two flat arrays, laid out in the order in which
backward completes the gradients. A parameter's `value` and `grad` are views. So a layer's matrix
product writes straight into the message that the ranks exchange, an optimizer updates whole
stretches at once, and "this bucket is ready" is one comparison of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from pydtnn.initializers import Initializer, generator
from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array

ALIGNMENT = 64
"""Bytes: every parameter starts on a cache line, which is also the widest vector."""

DEFAULT_BUCKET_BYTES = 1 << 20
"""So large that a message's latency is small, so small that the first leaves early in backward."""


class Parameter:
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
        Whether weight decay applies; biases and the parameters of norms leave it out.
    group : str
        Reduction group: parameters of one group are summed over the same ranks.

    Attributes
    ----------
    value, grad : Array
        Views into the flat arrays, once a `ParameterBuffer` holds the parameter.
    """

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
    ) -> None:
        self.name = name
        self.shape = shape
        self.initializer = initializer
        self.fan_in = fan_in
        self.fan_out = fan_out
        self.decay = decay
        self.group = group
        self.buffer: ParameterBuffer
        self.value: Array
        self.grad: Array

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def accumulate(self) -> bool:
        """Whether this backward pass adds to `grad`; otherwise it overwrites it."""
        return self.buffer.accumulate

    def store_grad(self, value: Array) -> None:
        """Overwrite `grad` with `value`, or add it, as this pass demands."""
        if self.accumulate:
            self.grad += value
        else:
            self.grad[...] = value

    def initial_value(self, seed: int) -> np.ndarray:
        """Draw the initial value (float64): a function of the seed and the name alone."""
        rng = generator(seed, self.name)
        return self.initializer(self.shape, self.fan_in, self.fan_out, rng)


class Entry(NamedTuple):
    """Where a parameter lies in its bucket's flat arrays."""

    name: str
    shape: tuple[int, ...]
    slice: slice
    decay: bool


@dataclass(frozen=True, eq=False)
class Bucket:
    """A stretch of the flat arrays that is exchanged and updated as one.

    Attributes
    ----------
    index : int
        Position among all buckets of the model, in the order they become ready.
    start, stop : int
        The stretch, in elements of its buffer's flat arrays.
    values, grads : Array
        Flat views ``[start:stop]``; padding between parameters is zero and stays zero.
    parameters : tuple of Entry
        The parameters within, with slices relative to `start`.
    ready_at : int
        Index of the graph node whose backward completes the bucket.
    group : str
        Reduction group.
    buffer : ParameterBuffer
        Which it is a stretch of.
    """

    index: int
    start: int
    stop: int
    values: Array
    grads: Array
    parameters: tuple[Entry, ...]
    ready_at: int
    group: str
    buffer: ParameterBuffer

    def gradients(self, slot: int) -> Array:
        """Return the bucket's stretch of one of the sets of gradients; 0 is `grads`."""
        return self.buffer.slots[slot][self.start : self.stop]


class ParameterBuffer:
    """The flat values and gradients of parameters of one dtype and reduction group.

    Parameters
    ----------
    parameters : sequence of (Parameter, int)
        In the order their gradients become ready, each with the index of the node that completes
        it.
    backend : Backend
    dtype : str or numpy.dtype
    bucket_bytes : int
        A bucket is closed when it holds at least this many bytes. The layout does not depend on the
        number of ranks.
    first_index : int
        Index of the first bucket.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[Parameter, int]],
        *,
        backend: Backend,
        dtype: str,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_index: int = 0,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.accumulate = False
        line = ALIGNMENT // self.dtype.itemsize
        offsets = np.cumsum([0] + [-(-p.size // line) * line for p, _ in parameters]).tolist()
        self.size: int = offsets[-1]
        self.values = backend.zeros((self.size,), self.dtype)
        self.grads = backend.zeros((self.size,), self.dtype)
        self.slots = [self.grads]
        self.parameters = tuple(p for p, _ in parameters)
        self._backend, self._offsets, self._slot = backend, offsets, 0
        for p, offset in zip(self.parameters, offsets, strict=False):
            p.buffer = self
            p.value = self.values[offset : offset + p.size].reshape(p.shape)
            p.grad = self.grads[offset : offset + p.size].reshape(p.shape)
        self.buckets = tuple(self._cut(parameters, offsets, bucket_bytes, first_index))

    def write_to(self, slot: int) -> None:
        """Let backward write gradients to one of several sets, which is made when it is needed."""
        while slot >= len(self.slots):
            self.slots.append(self._backend.zeros((self.size,), self.dtype))
        if slot != self._slot:
            self._slot = slot
            for p, offset in zip(self.parameters, self._offsets, strict=False):
                p.grad = self.slots[slot][offset : offset + p.size].reshape(p.shape)

    def _cut(
        self,
        parameters: Sequence[tuple[Parameter, int]],
        offsets: list[int],
        bucket_bytes: int,
        first_index: int,
    ) -> list[Bucket]:
        buckets: list[Bucket] = []
        first = 0
        for i, (parameter, node) in enumerate(parameters):
            start, stop = offsets[first], offsets[i + 1]
            full = (stop - start) * self.dtype.itemsize >= bucket_bytes
            if not full and i + 1 < len(parameters):
                continue
            entries = tuple(
                Entry(p.name, p.shape, slice(o - start, o - start + p.size), p.decay)
                for (p, _), o in zip(parameters[first : i + 1], offsets[first:], strict=False)
            )
            buckets.append(
                Bucket(
                    index=first_index + len(buckets),
                    start=start,
                    stop=stop,
                    values=self.values[start:stop],
                    grads=self.grads[start:stop],
                    parameters=entries,
                    ready_at=node,
                    group=parameter.group,
                    buffer=self,
                )
            )
            first = i + 1
        return buckets
