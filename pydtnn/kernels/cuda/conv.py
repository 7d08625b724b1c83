"""Convolutions on a GPU: the contract of the reference around engines that only convolve.

A convolution of cuDNN cannot evaluate its input or gate its output in passing. So what is deferred
is evaluated into memory first; gates and sums, and bias and ReLU where the engine does not do
them, follow in one pass over the output, by the kernels of the families `fused` and `norm`.
Whether bias, ReLU and sums of forward are better done in passing is measured, like all choices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from pydtnn.kernels.autotuner import Autotuner, Key
from pydtnn.kernels.cuda.engine import PLAIN, CarryOut, ConvEngine, Passing, PassingEngine, Refused
from pydtnn.kernels.cuda.module import ELEMENTS
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import ElementwiseKernels, FusedKernels, NormKernels
from pydtnn.kernels.reference import conv as reference
from pydtnn.kernels.reference.family import Array

APART, IN_PASSING = "apart", "in passing"
"""When bias, ReLU and sums are seen to."""


class Tools(NamedTuple):
    """What convolutions use besides their engines.

    Parameters
    ----------
    measure : callable
        Returns a context in which candidates are measured, see `Measure.session`.
    fused, norm, elementwise
        Other families of the backend.
    """

    measure: Callable[[], AbstractContextManager[CarryOut]]
    fused: FusedKernels
    norm: NormKernels
    elementwise: ElementwiseKernels


class CudaConv(reference.ConvKernels):
    """Convolutions of one to three axes on a GPU; shapes as in the reference.

    Inputs that are not contiguous are copied; outputs that are not, and mixed types, run on the
    reference. Beside 16-bit arrays, biases and the gradient of the filters may be of float32.
    `algorithm` is the name of one that an engine has for the geometry. All of them are
    deterministic. What is not measured takes the first: what cuDNN's heuristics put first, with
    bias, ReLU and sums apart. What an engine refuses when it comes to it is left to the others, and
    the report of `autotuner` says so.

    Parameters
    ----------
    xp : module
    engines : sequence of Engine
        The first with an algorithm for a geometry has the best guess; the last suits everything.
    autotuner : Autotuner
    tools : Tools
    passing : PassingEngine, optional
        The engine that may also do what follows forward.
    """

    def __init__(
        self,
        xp: Any,
        engines: tuple[ConvEngine, ...],
        autotuner: Autotuner,
        tools: Tools,
        passing: PassingEngine | None = None,
    ) -> None:
        super().__init__(xp)
        self.engines = engines
        self.autotuner = autotuner
        self.tools = tools
        self.passing = passing
        self._found: dict[Key, dict[str, ConvEngine]] = {}
        self._ways: dict[Key, dict[str, PassingEngine | None]] = {}

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
        shift = None if b is None else self.xp.asarray(b, arithmetic(out.dtype), order="C")
        passing = Passing(b is not None, relu, sums is not None)
        given = (self.xp.ascontiguousarray(values), self.xp.ascontiguousarray(w), geometry)
        ways: dict[str, PassingEngine | None] = {APART: None}
        if passing != PLAIN and algorithm is None:
            ways = self._ways_of_passing(geometry, len(values), out.dtype, passing)

        def run(way: str, out: Array, accumulate: bool) -> None:
            engine = ways[way]
            if engine:
                engine.run_passing(*given, out=out, shift=shift, relu=relu, sums=sums)
                return
            self._convolve("forward", *given, out, False, algorithm)
            if shift is not None or relu:
                self.tools.fused.evaluate(Deferred(Term(out), shift=shift, relu=relu), out=out)
            if sums is not None:
                self.tools.norm.statistics(out, out=sums)

        if len(ways) == 1:
            return run(APART, out, False)
        key = (f"forward with {passing}", geometry, len(values), out.dtype)
        self._run(key, ways, run, out, False, None)

    def takes_sums(
        self, geometry: ConvGeometry, batch: int, dtype: Any, *, bias: bool, relu: bool
    ) -> bool:
        """Whether `forward` takes sums in passing, or has yet to find out whether it does."""
        passing = Passing(bias, relu, sums=True)
        if len(self._ways_of_passing(geometry, batch, dtype, passing)) == 1:
            return False
        # without sums another way may be best for bias and ReLU, and would round in another place
        key = (f"forward with {passing}", geometry, batch, dtype)
        return bias or relu or self.autotuner.resolved.get(key) != APART

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
        """Compute the gradient of the input into `out`, gated by `FusedKernels.gate`."""
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
        widened = out.dtype == "float32" and x.dtype == dy.dtype and x.dtype.itemsize == 2
        if not (_writable(out) if widened else _writable(out, x, dy)):
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
        """Run one direction with the algorithm that the caller or `autotuner` says."""
        first, second = map(self.xp.ascontiguousarray, (first, second))
        batch = len(second if direction == "backward_data" else first)
        if not batch:
            if direction == "backward_filter":
                self.store(0, out, accumulate)
            return
        key = (direction, geometry, batch, first.dtype)
        found = self.algorithms(*key)

        def run(name: str, out: Array, accumulate: bool) -> None:
            given = (name, direction, first, second, geometry)
            found[name].run(*given, out=out, accumulate=accumulate)

        self._run(key, found, run, out, accumulate, algorithm)

    def _run(
        self,
        key: Key,
        found: dict[str, Any],
        run: Callable[[str, Array, bool], None],
        out: Array,
        accumulate: bool,
        algorithm: str | None,
    ) -> None:
        """Run what was asked for, or what is best of what was found and not refused."""
        if algorithm is not None and algorithm not in found:
            suit = ", ".join(found)
            raise ValueError(f"conv: {algorithm} does not suit {key[1]}; choose one of {suit}.")
        while True:
            name = algorithm or self.autotuner.resolved.get(key, "")
            if name not in found:
                name = self._pick(key, found, run, out, accumulate)
            try:
                return run(name, out, accumulate)
            except Refused as error:
                if algorithm or len(found) == 1:
                    raise
                self._drop(key, found, name, error)

    def _pick(
        self,
        key: Key,
        found: dict[str, Any],
        run: Callable[[str, Array, bool], None],
        out: Array,
        accumulate: bool,
    ) -> str:
        """Choose; what is computed on the way is not added to anything."""
        scratch = self.xp.empty(out.shape, out.dtype) if accumulate else out
        tried = ""

        def pick() -> str:
            with self.tools.measure() as carry_out:

                def measured(name: str) -> None:
                    nonlocal tried
                    tried = name
                    carry_out(name, lambda: run(name, scratch, False))

                return self.autotuner.pick(*key, tuple(found), measured)

        while True:
            try:
                return pick()
            except (Refused, MemoryError) as error:
                if len(found) == 1:
                    raise
                self._drop(key, found, tried, error)

    def _drop(self, key: Key, found: dict[str, Any], name: str, error: Exception) -> None:
        """Use an algorithm no more, and report why."""
        del found[name]
        self.autotuner.drop(*key, name, f"refused: {error}")

    def algorithms(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> dict[str, ConvEngine]:
        """Name the algorithms that suit, with the engine of each; the first is the best guess."""
        key = (direction, geometry, batch, dtype)
        if key not in self._found:
            self._found[key] = {
                name: engine
                for engine in self.engines
                for name in engine.candidates(direction, geometry, batch, dtype)
            }
        return self._found[key]

    def _ways_of_passing(
        self, geometry: ConvGeometry, batch: int, dtype: Any, passing: Passing
    ) -> dict[str, PassingEngine | None]:
        """Name the ways to do what follows forward: apart, and in passing where that may be."""
        key = (str(passing), geometry, batch, dtype)
        if key not in self._ways:
            self._ways[key] = {APART: None}
            if self.passing and self.passing.passes(geometry, batch, dtype, passing):
                self._ways[key][IN_PASSING] = self.passing
        return self._ways[key]


def _writable(out: Array, *inputs: Array | Deferred) -> bool:
    """Whether engines can write `out` and read the inputs without a conversion."""
    return (
        out.flags.c_contiguous
        and out.dtype.name in ELEMENTS
        and all(value.dtype == out.dtype for value in inputs)
    )
