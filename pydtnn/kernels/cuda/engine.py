"""What convolves on a GPU: engines, each with algorithms that suit some geometries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from pydtnn.kernels.cuda.graph import capture
from pydtnn.kernels.cuda.memory import DeviceMemory
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array


class Refused(RuntimeError):
    """An engine cannot do what it was asked for, and has written nothing: another one may."""


class ConvEngine(Protocol):
    """Algorithms for convolutions of arrays that are there, contiguous and of one type.

    The gradient of 16-bit filters may be of float32: so master weights get all digits of it.
    """

    def candidates(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> tuple[str, ...]:
        """Name those that suit, the best guess first.

        Parameters
        ----------
        direction : str
            "forward", "backward_data" or "backward_filter".
        geometry : ConvGeometry
        batch : int
        dtype : dtype
            Of the inputs.
        """

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
        """Compute y of x and w, dx of w and dy, or dw of x and dy.

        Parameters
        ----------
        algorithm : str
            One of `candidates`.
        direction : str
        first, second : Array
            x and w, w and dy, or x and dy.
        geometry : ConvGeometry
        out : Array
        accumulate : bool
            Whether to add to `out`.

        Raises
        ------
        Refused
        """


class Passing(NamedTuple):
    """What is done to the output of a convolution in passing.

    Parameters
    ----------
    shift, relu, sums : bool
        Add biases; cut off below 0; take the sums and sums of squares per channel of the output.
    """

    shift: bool = False
    relu: bool = False
    sums: bool = False

    def __str__(self) -> str:
        return ", ".join(name for name, does in zip(self._fields, self, strict=True) if does)


PLAIN = Passing()


class PassingEngine(Protocol):
    """An engine that can do what follows a convolution forward while the output is at hand."""

    def passes(self, geometry: ConvGeometry, batch: int, dtype: Any, passing: Passing) -> bool:
        """Whether it may be able to do all of it, as far as it knows without an effort."""

    def run_passing(
        self,
        x: Array,
        w: Array,
        geometry: ConvGeometry,
        *,
        out: Array,
        shift: Array | None,
        relu: bool,
        sums: Array | None,
    ) -> None:
        """Compute y, and what follows.

        Parameters
        ----------
        x, w : Array
        geometry : ConvGeometry
        out : Array
        shift : Array, shape (O,), optional
            Biases, of the type that is computed with.
        relu : bool
        sums : Array, shape (1 + 2 O,), float64, optional
            For what `NormKernels.statistics` computes of the output.

        Raises
        ------
        Refused
        """


# Candidates as they will run in a captured step: several times in a row, from one CUDA graph.
#
# Launching a small kernel takes the host longer than the kernel takes the device, and some
# libraries' more than others'. In a captured step that does not count, so here it must not either.
# What cannot be captured is found out in passing.

REPEATS = 8
"""Launches for one measurement, so that they, and not the wait for them, are what is timed."""

CarryOut = Callable[[str, Callable[[], None]], None]
"""Carries out a candidate of a name, and waits for it; called once, and then again to be timed."""


class Measure:
    """Where candidates are measured: a stream, and memory that is given back afterwards.

    Parameters
    ----------
    cupy : module
    memory : DeviceMemory
    """

    def __init__(self, cupy: Any, memory: DeviceMemory) -> None:
        self._cupy, self._memory = cupy, memory
        self._stream = cupy.cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def session(self) -> Iterator[CarryOut]:
        """Return a context with a function that carries out candidates.

        It raises `Refused` for what cannot be captured, and what candidates raise themselves.
        """
        graphs: dict[str, Any] = {}
        with contextlib.ExitStack() as session:

            def carry_out(name: str, work: Callable[[], None]) -> None:
                if not graphs:  # often nothing is measured, perhaps while a step is captured
                    self._begin(session)
                with self._stream:
                    if name not in graphs:
                        work()  # loads kernels and makes choices, which cannot be captured
                        graphs[name] = self._capture(work)
                    graphs[name].launch(self._stream)
                    self._stream.synchronize()

            yield carry_out

    def _begin(self, session: contextlib.ExitStack) -> None:
        """Let our stream begin after the caller's, with memory of its own."""
        cuda = self._cupy.cuda
        before = cuda.get_current_stream().record(cuda.Event(disable_timing=True))
        self._stream.wait_event(before)
        session.enter_context(self._memory.temporary())
        session.enter_context(self._memory.scratch.passing())
        session.callback(self._stream.synchronize)  # first of these, also after an error

    def _capture(self, work: Callable[[], None]) -> Any:
        """Capture some launches on our stream."""

        def several() -> None:
            for _ in range(REPEATS):
                work()

        try:
            return capture(self._stream, several)[0]
        except Exception as problem:
            raise Refused(f"it cannot be captured in a graph: {problem}") from problem
