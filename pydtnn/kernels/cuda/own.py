"""What families with CUDA kernels of our own share: launching, and which arrays they take."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels.cuda.layout import MOST_PARTS, columns
from pydtnn.kernels.cuda.module import ELEMENTS, Module
from pydtnn.kernels.reference.family import Array, Number

NULL = np.uint64(0)


class Device:
    """What the families of one GPU share.

    Sums meet in memory that is counted by `arrived`, which all kernels use: two of them must not
    run at the same time. So families are used on one stream at a time.

    Parameters
    ----------
    cupy : module

    Attributes
    ----------
    arrived : Array
        Counters of blocks, 0 between kernels.
    go : Array, shape (1,), float64
        Where 0, parameters, the state of optimizers and running statistics stay as they are.
    alive : Array, shape (1,), float64
        0 once and for all when a total has not been finite.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.arrived = cupy.zeros(MOST_PARTS, "uint32")
        self.go, self.alive = (cupy.ones(1, "float64") for _ in range(2))
        self._modules: dict[str, Module] = {}

    def module(self, source: str) -> Module:
        """Return the kernels of a source."""
        if source not in self._modules:
            self._modules[source] = Module(self._cupy, source)
        return self._modules[source]


class Own:
    """Mixed into a reference family, whose kernels the subclass replaces by ours.

    A kernel that meets other arrays than ours takes (another type, an output that is not
    contiguous) hands them to the reference; inputs that are not contiguous are copied.

    Parameters
    ----------
    xp : module
        ``cupy``.
    device : Device
    """

    source: ClassVar[str]
    """Name of the source of most of the family's kernels, without the suffix."""

    xp: Any

    def __init__(self, xp: Any, device: Device) -> None:
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family comes after us
        self.device = device

    def launch(
        self,
        name: str,
        element: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *arguments: Any,
        source: str | None = None,
    ) -> None:
        """Start kernel ``name_element`` on the current stream; None is a null pointer.

        `source` is another than the family's own.
        """
        given = tuple(NULL if a is None else int(a) if type(a) is bool else a for a in arguments)
        self.device.module(source or self.source).kernel(name, element)(grid, block, given)

    def step(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Start a kernel of step.cu."""
        self.launch(name, "float64", (blocks,), (threads,), *arguments, source="step")

    def per_channel(
        self,
        name: str,
        rows: int,
        channels: int,
        out: Array,
        *arguments: Any,
        arrays: tuple[Array | None, ...],
    ) -> None:
        """Start a map over (rows, channels), whose kernel takes `arguments` and the layout.

        Vectors are loaded if the addresses of `out` and of `arrays`, inputs and coefficients,
        allow it.
        """
        if not (rows and channels):
            return
        width, each = vectors(channels, out, *arrays)
        kernel, layout = f"{name}_{width}", columns(rows, channels, each, summed=False)
        self.launch(
            kernel,
            out.dtype.name,
            layout.grid,
            layout.block,
            *arguments,
            rows,
            channels,
            layout.part_rows,
        )

    def summed(
        self,
        name: str,
        rows: int,
        channels: int,
        sums: int,
        x: Array,
        *arguments: Any,
        arrays: tuple[Array | None, ...] = (),
        run: int | None = None,
    ) -> None:
        """Start a kernel with so many sums per channel; like `per_channel`, of the type of `x`.

        Channels that a thread takes together are of one `run` of so many.
        """
        width, each = vectors(run or channels, x, *arrays)
        kernel, layout = f"{name}_{width}", columns(rows, channels, each, summed=True)
        partial = self.xp.empty(layout.partial(sums), "float64")
        self.launch(
            kernel,
            x.dtype.name,
            layout.grid,
            layout.block,
            *arguments,
            rows,
            channels,
            layout.part_rows,
            partial,
            self.device.arrived,
        )


def native(out: Array, *inputs: Array | None) -> bool:
    """Whether our kernels take these: all of one type that they know, the output contiguous."""
    return (
        out.dtype.name in ELEMENTS
        and out.flags.c_contiguous
        and all(a is None or a.dtype == out.dtype for a in inputs)
    )


def all_of(dtype: Any, *arrays: Array | None) -> bool:
    """Whether these are contiguous arrays of a type."""
    return all(a is None or (a.dtype == dtype and a.flags.c_contiguous) for a in arrays)


def aligned(elements: int, *arrays: Array | None) -> bool:
    """Whether vectors of so many elements can be loaded from all of these, 16 bytes at once."""
    return all(a is None or a.data.ptr % min(elements * a.itemsize, 16) == 0 for a in arrays)


def vectors(neighbours: int, *arrays: Array | None) -> tuple[str, int]:
    """Find how many of these neighbours are loaded at once, by the type of the first array.

    Returns
    -------
    tuple of (str, int)
        The name in kernels, and the elements: of 16 bytes, or one.
    """
    first = next(a for a in arrays if a is not None)
    each: int = 16 // first.itemsize
    fit = neighbours % each == 0 and aligned(each, *arrays)
    return ("wide", each) if fit else ("single", 1)


def number(value: Number) -> tuple[float, Array | None]:
    """Two arguments of a kernel for a number: its value, or where it is in device memory.

    Raises
    ------
    TypeError
        If an array is not of float64.
    """
    if isinstance(value, Real):
        return float(value), None
    array = value
    if array.dtype != "float64" or array.size != 1:
        raise TypeError(
            f"a number in device memory must be one float64, not {array.dtype} {array.shape}"
        )
    return 0.0, array
