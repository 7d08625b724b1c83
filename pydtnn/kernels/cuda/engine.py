"""What convolves on a GPU: engines, each with algorithms that suit some geometries."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array


class Refused(RuntimeError):
    """An engine cannot do what it was asked for, and has written nothing: another one may."""


class Engine(Protocol):
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
            For what `Norm.statistics` computes of the output.

        Raises
        ------
        Refused
        """
