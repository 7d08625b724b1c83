"""Calls of kernels with their arrays, to be repeated with new values in the same memory."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.observed import wrapped_kernels

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function with its arguments."""

DIRECT = frozenset(
    (
        *("conv.forward", "conv.backward", "conv.backward_data", "conv.backward_filter"),
        *("norm.coefficients", "norm.backward_coefficients", "fused.gate", "fused.evaluate"),
        *("linear.forward", "linear.backward_data", "linear.backward_filter", "elementwise.add"),
    )
)
"""Kernels that do nothing but choose and call a compiled one, if they give it the same arrays; it
is then recorded instead."""

QUERIES = ("conv.takes_sums", "fused.values", "norm.sums_length")
"""Functions of families that compute nothing, or by other kernels."""


class _Compiled:
    """The compiled kernels of a family, with the calls that are made."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.made: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.kernels, name)

        def call(*args: Any) -> Any:
            result = kernel(*args)
            self.made.append((kernel, args, result))
            return result

        return call


def _arrays(values: Sequence[Any]) -> set[int]:
    """Return which arrays, deferred ones included, are among arguments."""
    return {id(value) for value in values if isinstance(value, np.ndarray | Deferred)}


class MovedInput:
    """An input that a repetition finds at another address, and the arrays of calls within it."""

    def __init__(self, array: np.ndarray) -> None:
        self.start, self.nbytes = array.ctypes.data, array.nbytes
        self.aliases: list[np.ndarray] = []

    def has(self, array: np.ndarray) -> bool:
        """Return whether an array overlaps with this one, or begins in it."""
        start = array.ctypes.data
        return start < self.start + self.nbytes and self.start < start + max(array.nbytes, 1)


class KernelRecorder:
    """Records calls of kernels in a context `recording`.

    Arrays that are made in the backend's pool meanwhile are replaced by aliases, so that the pool
    uses their memory again as it does without recording; a repetition reserves it: see `spans` and
    `MemoryPool.claim`. Arrays in those that it is given (`inputs`) are replaced, too, and moved.
    Others, earlier and small ones, are kept.

    Parameters
    ----------
    backend : Backend
        With a `MemoryPool`.
    record : callable
        Receives each call.

    Attributes
    ----------
    why_not : str
        Why the calls cannot be repeated; empty if they can.
    """

    def __init__(self, backend: Backend, record: Callable[[Call], None]) -> None:
        self._backend, self._memory = backend, backend.memory
        self.record, self.why_not = record, ""
        self._before = {serial for *_, serial in self._memory.blocks()}
        self._used: dict[int, int] = {}  # memory of arrays: the last address by the first
        self._aliases: dict[Any, np.ndarray] = {}
        self._given: list[MovedInput] = []
        self._busy = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the kernels that this thread calls are recorded."""
        thread = threading.get_ident()

        def recorded(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
            if name in QUERIES:
                return kernel

            def call(*args: Any, **options: Any) -> Any:
                if self._busy or threading.get_ident() != thread:
                    return kernel(*args, **options)
                record = kernel, self.fixed(args), self.fixed(options)
                self._busy = True
                try:
                    own = not str(kernel.__module__).startswith("pydtnn.kernels.")  # a user's
                    if name in DIRECT and hasattr(kernel, "__self__") and not own:
                        result, record = self._direct(record, kernel, args, options)
                    else:
                        result = kernel(*args, **options)
                finally:
                    self._busy = False
                self.record(record)
                if result is not None:
                    self.why_not = f"the result of {name} is no array that it was given"
                return result

            return call

        with wrapped_kernels(self._backend, recorded):
            yield

    def _direct(self, record: Call, kernel: Any, args: Any, options: Any) -> tuple[Any, Call]:
        """Call a kernel; return the compiled one that it has called, if that is all it does."""
        family, calls = kernel.__self__, _Compiled(kernel.__self__.kernels)
        family.kernels = calls
        try:
            result = kernel(*args, **options)
        finally:
            family.kernels = calls.kernels
        if len(calls.made) == 1:
            function, own, done = calls.made[0]
            if done is not False and _arrays(own) == _arrays((*args, *options.values())):
                record = function, self.fixed(own), {}
        return result, record

    def fixed(self, value: Any) -> Any:
        """Return an argument with aliases of its arrays."""
        if isinstance(value, np.ndarray):
            return self._alias(value)
        if isinstance(value, Deferred):
            copy = value.of_terms(*map(self.fixed, value.terms), shift=self.fixed(value.shift))
            copy.array, copy.keep, copy.sums = self.fixed(value.array), value.keep, value.sums
            return copy
        if isinstance(value, dict):
            return {key: self.fixed(part) for key, part in value.items()}
        if isinstance(value, tuple | list):
            parts = map(self.fixed, value)
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def outside(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function whose calls of kernels are not recorded."""

        def call(*args: Any) -> None:
            self._busy = True
            try:
                function(*args)
            finally:
                self._busy = False

        return call

    def inputs(self, arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[MovedInput]]:
        """Return arrays to be given to a pass, which must exist until its end, and their calls'.

        One that overlaps with another is copied.
        """
        own: list[np.ndarray] = []
        for array in arrays:
            own.append(array.copy() if any(g.has(array) for g in self._given) else array)
            self._given.append(MovedInput(own[-1]))
        return own, self._given[len(self._given) - len(own) :]

    def _alias(self, array: np.ndarray) -> np.ndarray:
        given = next((g for g in self._given if g.has(array)), None)
        if given is None:
            owner = self._memory.owner(array)
            if owner is None or self._memory.allocation(owner) in self._before:
                return array
            start = owner.ctypes.data
            self._used[start] = max(self._used.get(start, 0), start + owner.nbytes)
        key = given, array.ctypes.data, array.shape, array.strides, array.dtype
        if key not in self._aliases:
            self._aliases[key] = self._memory.alias(array)
            if given is not None:
                given.aliases.append(self._aliases[key])
        return self._aliases[key]

    def spans(self) -> list[tuple[int, int]]:
        """Return the memory of the arrays, free now: the first and last address of each part."""
        blocks = self._memory.blocks()
        starts = [start for start, *_ in blocks]
        spans: dict[int, tuple[int, int]] = {}
        for first, last in self._used.items():
            block, _, serial = blocks[bisect_right(starts, first) - 1]
            low, high = spans.get(block, (first, last))
            spans[block] = min(low, first), max(high, last)
            if serial:
                self.why_not = "an array of the step is still in use after it"
        return [*spans.values()]
