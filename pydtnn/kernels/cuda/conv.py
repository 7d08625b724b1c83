"""Convolutions on a GPU: the contract of the reference around an engine that only convolves.

A convolution of cuDNN cannot evaluate its input or gate its output in passing. So what is deferred
is evaluated into memory first, bias and ReLU, sums and gates follow in one pass over the output, by
the kernels of the families `fused` and `norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pydtnn.kernels.choices import Choices
from pydtnn.kernels.cuda.module import ELEMENTS
from pydtnn.kernels.cuda.own import arithmetic
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import Elementwise, Fused, Norm
from pydtnn.kernels.reference import conv as reference
from pydtnn.kernels.reference.family import Array

REPEATS = 8
"""Launches for one measurement, so that they, and not the wait for them, are what is timed."""


class Engine(Protocol):
    """Algorithms for convolutions of arrays that are there, contiguous and of one type."""

    def candidates(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> tuple[str, ...]:
        """Names of those that suit, the best guess first."""

    def run(
        self,
        algorithm: str,
        direction: str,
        first: Array,
        second: Array,
        geometry: ConvGeometry,
        *,
        out: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute y of x and w, dx of w and dy, or dw of x and dy."""


class Tools(NamedTuple):
    """What convolutions use besides their engines.

    Parameters
    ----------
    synchronize : callable
        Waits for the current stream; used while algorithms are measured, never else.
    fused, norm, elementwise
        Other families of the backend.
    """

    synchronize: Callable[[], None]
    fused: Fused
    norm: Norm
    elementwise: Elementwise


class Conv(reference.Conv):
    """Convolutions of one to three axes on a GPU; shapes as in the reference.

    Inputs that are not contiguous are copied; outputs that are not, and mixed types, run on the
    reference. `algorithm` is the name of one that an engine has for the geometry.

    Parameters
    ----------
    xp : module
    engines : sequence of Engine
        The first with an algorithm for a geometry has the best guess; the last suits everything.
    choices : Choices
    tools : Tools
    """

    def __init__(
        self, xp: Any, engines: tuple[Engine, ...], choices: Choices, tools: Tools
    ) -> None:
        super().__init__(xp)
        self.engines = engines
        self.choices = choices
        self.tools = tools
        self._found: dict[Any, dict[str, Engine]] = {}

    def forward(
        self,
        x: Array | Deferred,
        w: Array,
        b: Array | None,
        geometry: ConvGeometry,
        *,
        out: Array,
        relu: bool = False,
        store: Array | None = None,
        sums: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Compute ``out[n, p, o] = b[o] + sum over t and c of x[n, p s + t d, c] w[o, t, c]``."""
        if not _writable(out, x, w):
            return super().forward(x, w, b, geometry, out=out, relu=relu, store=store, sums=sums)
        values = self._values(x, store)
        self._convolve("forward", values, w, geometry, out, False, algorithm)
        if b is not None or relu:
            shift = None if b is None else self.xp.asarray(b, arithmetic(out.dtype), order="C")
            self.tools.fused.evaluate(Deferred(Term(out), shift=shift, relu=relu), out=out)
        if sums is not None:
            self.tools.norm.statistics(out, out=sums)

    def backward_data(
        self,
        dy: Array | Deferred,
        w: Array,
        geometry: ConvGeometry,
        *,
        out: Array,
        add: Array | None = None,
        gate: Deferred | None = None,
        sums: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Compute the gradient of the input into `out`, with what `Fused.gate` makes of it."""
        if not _writable(out, dy, w):
            return super().backward_data(dy, w, geometry, out=out, add=add, gate=gate, sums=sums)
        in_place = add is out
        values = self._values(dy)
        self._convolve("backward_data", w, values, geometry, out, in_place, algorithm)
        rest = None if in_place else add
        if gate is not None:
            self.tools.fused.gate(out, gate, out=out, sums=sums, add=rest)
        elif rest is not None:
            self.tools.elementwise.add(out, rest, out=out)

    def backward_filter(
        self,
        x: Array | Deferred,
        dy: Array | Deferred,
        geometry: ConvGeometry,
        *,
        out: Array,
        accumulate: bool = False,
        algorithm: str | None = None,
    ) -> None:
        """Compute the gradient of the filters into `out`."""
        if not _writable(out, x, dy):
            return super().backward_filter(x, dy, geometry, out=out, accumulate=accumulate)
        x, dy = self._values(x), self._values(dy)
        self._convolve("backward_filter", x, dy, geometry, out, accumulate, algorithm)

    def backward(
        self,
        x: Array | Deferred,
        dy: Array | Deferred,
        w: Array,
        geometry: ConvGeometry,
        *,
        dx: Array,
        dw: Array,
        accumulate: bool = False,
        add: Array | None = None,
        gate: Deferred | None = None,
        sums: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Compute both gradients, evaluating `dy` once."""
        dy = self._values(dy)
        self.backward_filter(x, dy, geometry, out=dw, accumulate=accumulate, algorithm=algorithm)
        self.backward_data(
            dy, w, geometry, out=dx, add=add, gate=gate, sums=sums, algorithm=algorithm
        )

    def _values(self, x: Array | Deferred, store: Array | None = None) -> Array:
        """Return the values, in order: `x` itself, what it keeps, or new ones."""
        if not isinstance(x, Deferred):
            return self.xp.ascontiguousarray(x)
        if store is None and x.array is not None:
            return self.xp.ascontiguousarray(x.array)
        values = self.xp.empty(x.shape, x.dtype)
        if store is not None and store.flags.c_contiguous:
            values = store
        self.tools.fused.evaluate(x, out=values)
        if store is not None and values is not store:
            store[...] = values
        return values

    # -- which algorithm --------------------------------------------------------------------------

    def _convolve(
        self,
        direction: str,
        first: Array,
        second: Array,
        geometry: ConvGeometry,
        out: Array,
        accumulate: bool,
        algorithm: str | None,
    ) -> None:
        """Run one direction with the algorithm that the caller or `choices` says."""
        first, second = map(self.xp.ascontiguousarray, (first, second))
        batch = len(second if direction == "backward_data" else first)
        if not batch:
            if direction == "backward_filter":
                self.store(0, out, accumulate)
            return
        found = self.algorithms(direction, geometry, batch, out.dtype)
        if algorithm is None:
            key = (direction, geometry, batch, out.dtype)
            algorithm = self.choices.resolved.get(key)
        if algorithm is None:
            algorithm = self._choose(found, direction, first, second, geometry, out, accumulate)
        if algorithm not in found:
            suit = ", ".join(found)
            raise ValueError(f"conv: {algorithm} does not suit {geometry}; choose one of {suit}.")
        found[algorithm].run(
            algorithm, direction, first, second, geometry, out=out, accumulate=accumulate
        )

    def algorithms(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> dict[str, Engine]:
        """Name the algorithms that suit, with the engine of each; the first is the best guess."""
        key = (direction, geometry, batch, dtype)
        if key not in self._found:
            self._found[key] = {
                name: engine
                for engine in self.engines
                for name in engine.candidates(direction, geometry, batch, dtype)
            }
        return self._found[key]

    def _choose(
        self,
        found: dict[str, Engine],
        direction: str,
        first: Array,
        second: Array,
        geometry: ConvGeometry,
        out: Array,
        accumulate: bool,
    ) -> str:
        """Pick an algorithm; what is computed on the way is not added to anything."""
        scratch = self.xp.empty(out.shape, out.dtype) if accumulate else out

        def run(name: str) -> None:
            for _ in range(REPEATS):
                found[name].run(name, direction, first, second, geometry, out=scratch)
            self.tools.synchronize()

        batch = len(second if direction == "backward_data" else first)
        return self.choices.pick(direction, geometry, batch, out.dtype, tuple(found), run)


def _writable(out: Array, *inputs: Array | Deferred) -> bool:
    """Whether engines can write `out` and read the inputs without a conversion."""
    return (
        out.flags.c_contiguous
        and out.dtype.name in ELEMENTS
        and all(value.dtype == out.dtype for value in inputs)
    )
