"""What families with CUDA kernels of our own share: launching, and which arrays they take."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels.cuda.layout import MOST_PARTS, Columns, columns
from pydtnn.kernels.cuda.module import ELEMENTS, Module
from pydtnn.kernels.reference.family import Array

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
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.arrived = cupy.zeros(MOST_PARTS, "uint32")

    def module(self, source: str) -> Module:
        """Return the kernels of a source."""
        return Module(self._cupy, source)


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
    """Name of the source of the family's kernels, without the suffix."""

    xp: Any

    def __init__(self, xp: Any, device: Device) -> None:
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family comes after us
        self.device = device
        self.module = device.module(self.source)

    def launch(
        self,
        name: str,
        element: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *arguments: Any,
    ) -> None:
        """Start kernel ``name_element`` on the current stream; None is a null pointer."""
        given = tuple(NULL if a is None else int(a) if type(a) is bool else a for a in arguments)
        self.module.kernel(name, element)(grid, block, given)

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

        `out` and `arrays` decide whether vectors can be loaded.
        """
        if not (rows and channels):
            return
        kernel, layout = self._columns(name, rows, channels, (out, *arrays), summed=False)
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
    ) -> None:
        """Start a kernel with so many sums per channel; like `per_channel`, of the type of `x`."""
        kernel, layout = self._columns(name, rows, channels, (x, *arrays), summed=True)
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

    @staticmethod
    def _columns(
        name: str, rows: int, channels: int, arrays: tuple[Array | None, ...], *, summed: bool
    ) -> tuple[str, Columns]:
        each = min(4, *(16 // a.itemsize for a in arrays if a is not None))
        width = "wide"
        if channels % each or not aligned(each, *arrays):
            width, each = "single", 1
        return f"{name}_{width}", columns(rows, channels, each, summed=summed)


def native(out: Array, *inputs: Array | None) -> bool:
    """Whether our kernels take these: all of one type that they know, the output contiguous."""
    return (
        out.dtype.name in ELEMENTS
        and out.flags.c_contiguous
        and all(a is None or a.dtype == out.dtype for a in inputs)
    )


def arithmetic(dtype: Any) -> str:
    """Type that elements of a type are computed with, and their coefficients have."""
    return "float64" if dtype.name == "float64" else "float32"


def all_of(dtype: str, *arrays: Array | None) -> bool:
    """Whether these are contiguous arrays of a type."""
    return all(a is None or (a.dtype == dtype and a.flags.c_contiguous) for a in arrays)


def aligned(elements: int, *arrays: Array | None) -> bool:
    """Whether vectors of so many elements can be loaded from all of these."""
    return all(a is None or a.data.ptr % (elements * a.itemsize) == 0 for a in arrays)


def number(value: float | Array) -> tuple[float, Array | None]:
    """Two arguments of a kernel for a number: its value, or where it is in device memory.

    Raises
    ------
    TypeError
        If an array is not of float64.
    """
    if isinstance(value, Real):
        return float(value), None
    array: Array = value
    if array.dtype != "float64" or array.size != 1:
        raise TypeError(
            f"a number in device memory must be one float64, not {array.dtype} {array.shape}"
        )
    return 0.0, array
