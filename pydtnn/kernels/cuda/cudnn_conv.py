"""Convolutions by cuDNN: descriptors and algorithms of each geometry, and what it cannot do.

cuDNN pads both sides of an axis alike. Where a geometry does not, the input is copied into a larger
array whose border is zero, and the gradient of that array is cut to size. The gradient of 16-bit
filters is computed in 16 bits (cuDNN has no other) and converted to float32.
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int, c_size_t
from dataclasses import replace
from typing import Any, NamedTuple

from pydtnn.kernels.cuda.cudnn import (
    CONVERSION_MATH,
    DEFAULT_MATH,
    DETERMINISTIC,
    DIRECTIONS,
    FMA_MATH,
    TENSOR_OP_MATH,
    Cudnn,
    CudnnError,
    Handle,
    Performance,
)
from pydtnn.kernels.cuda.engine import Refused
from pydtnn.kernels.cuda.memory import Scratch
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import ElementwiseKernels
from pydtnn.kernels.reference.family import Array

TYPES = ("float32", "float16", "bfloat16")
"""For float64 cuDNN has few algorithms, none of them for NHWC: im2row and cuBLAS have them."""


class CudnnEngine:
    """Convolutions on the current stream, with plans that are kept.

    Parameters
    ----------
    cudnn : Cudnn
    cupy : module
    handle : Handle
    elementwise : Elementwise
    scratch : Scratch
    tf32 : bool
        Whether float32 may be rounded to TF32 before it is multiplied.
    """

    def __init__(
        self,
        cudnn: Cudnn,
        cupy: Any,
        handle: Handle,
        elementwise: ElementwiseKernels,
        scratch: Scratch,
        *,
        tf32: bool,
    ) -> None:
        self._cudnn, self._cupy, self._handle, self._tf32 = cudnn, cupy, handle, tf32
        self._elementwise, self._scratch = elementwise, scratch
        self._plans: dict[Any, Any] = {}

    @staticmethod
    def suits(geometry: ConvGeometry, batch: int, dtype: str) -> bool:
        """Whether cuDNN may be asked at all."""
        return dtype in TYPES and batch > 0 and len(geometry.size) <= 3


WORKSPACE_BYTES = 1 << 30
"""Algorithms that need more are left out."""

MAX_ALGORITHMS = 32
"""More than cuDNN has for a direction, with each kind of arithmetic."""

_ZERO, _ONE = byref(c_float(0)), byref(c_float(1))


class Algorithm(NamedTuple):
    """An algorithm of cuDNN's: its number, what it computes with, the bytes it needs."""

    number: int
    math: int
    workspace: int


class ConvPlan:
    """One direction of a convolution as cuDNN sees it.

    Parameters
    ----------
    cudnn : Cudnn
    handle : Handle
    direction : str
        One of `DIRECTIONS`.
    geometry : ConvGeometry
        Padded alike on both sides.
    batch : int
    dtype : str
        One of `cudnn_engine.TYPES`.
    tf32 : bool

    Attributes
    ----------
    algorithms : dict of str to Algorithm
        Those that can be used, the one first that cuDNN expects to be the fastest.
    """

    def __init__(
        self,
        cudnn: Cudnn,
        handle: Handle,
        direction: str,
        geometry: ConvGeometry,
        batch: int,
        dtype: str,
        *,
        tf32: bool,
    ) -> None:
        x = cudnn.tensor(batch, geometry.size, geometry.channels, dtype)
        y = cudnn.tensor(batch, geometry.output, geometry.filters, dtype)
        w = cudnn.filters(geometry, dtype)
        self.first, self.second, self.result = {
            "forward": (x, w, y),
            "backward_data": (w, y, x),
            "backward_filter": (x, y, w),
        }[direction]
        self.convolution = cudnn.convolution(geometry, dtype)
        self._cudnn, self._handle, self._direction = cudnn, handle, DIRECTIONS[direction]
        exact = dtype == "float32" and not tf32
        self.algorithms = self._find(FMA_MATH if exact else None, dtype)
        self._math: int | None = None

    def _find(self, only: int | None, dtype: str) -> dict[str, Algorithm]:
        """Ask for the algorithms, with one kind of arithmetic or what cuDNN says."""
        usual = DEFAULT_MATH if dtype == "float32" else TENSOR_OP_MATH
        self._set_math(usual if only is None else only)
        count, found = c_int(), (Performance * MAX_ALGORITHMS)()
        descriptors = (self._handle, self.first, self.second, self.convolution, self.result)
        self._cudnn.call[self._direction.expect](*descriptors, len(found), byref(count), found)
        algorithms: dict[str, Algorithm] = {}
        for expected in found[: count.value]:
            name = self._direction.algorithms.get(expected.algorithm)
            math = expected.math if only is None else only
            if name is None or name in algorithms or expected.status:
                continue
            if expected.determinism != DETERMINISTIC or math == CONVERSION_MATH:
                continue
            workspace = self._workspace(expected.algorithm, math)
            if workspace is not None and workspace <= WORKSPACE_BYTES:
                algorithms[name] = Algorithm(expected.algorithm, math, workspace)
        return algorithms

    def _workspace(self, number: int, math: int) -> int | None:
        """Bytes that an algorithm needs; None if it cannot be used."""
        self._set_math(math)
        size = c_size_t()
        descriptors = (self._handle, self.first, self.second, self.convolution, self.result)
        try:
            self._cudnn.call[self._direction.workspace](*descriptors, number, byref(size))
        except CudnnError as error:
            if error.unsupported:
                return None
            raise
        return size.value

    def _set_math(self, math: int) -> None:
        self._cudnn.call["cudnnSetConvolutionMathType"](self.convolution, math)

    def run(
        self,
        algorithm: Algorithm,
        first: Array,
        second: Array,
        out: Array,
        accumulate: bool,
        workspace: Array,
    ) -> None:
        """Launch an algorithm on the handle's stream."""
        if algorithm.math != self._math:
            self._set_math(algorithm.math)
            self._math = algorithm.math
        self._cudnn.call[self._direction.convolve](
            *(self._handle, _ONE, self.first, first.data.ptr, self.second, second.data.ptr),
            *(self.convolution, algorithm.number, workspace.data.ptr, algorithm.workspace),
            *(_ONE if accumulate else _ZERO, self.result, out.data.ptr),
        )


class CudnnConvolutions(CudnnEngine):
    """Its older interface, with one plan per direction, geometry, batch and dtype."""

    def candidates(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> tuple[str, ...]:
        """Name the algorithms that suit, the one first that cuDNN expects to be the fastest."""
        plan = self._plan(direction, geometry, batch, dtype)
        return tuple(plan.algorithms) if plan else ()

    def _plan(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> ConvPlan | None:
        key = (direction, geometry, batch, dtype)
        if key not in self._plans:
            self._plans[key] = self._make_plan(direction, even(geometry), batch, dtype.name)
        plan: ConvPlan | None = self._plans[key]
        return plan

    def _make_plan(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: str
    ) -> ConvPlan | None:
        if not self.suits(geometry, batch, dtype):
            return None
        try:
            return ConvPlan(
                self._cudnn, self._handle, direction, geometry, batch, dtype, tf32=self._tf32
            )
        except CudnnError as error:
            if error.unsupported:
                return None
            raise

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
        """Compute one direction. See `pydtnn.kernels.cuda.engine.ConvEngine`."""
        batch = len(second if direction == "backward_data" else first)
        plan = self._plan(direction, geometry, batch, first.dtype)
        assert plan is not None, f"no plan for {direction} {geometry}"
        chosen = plan.algorithms[algorithm]
        workspace = self._scratch.take(chosen.workspace)
        self._handle.to_current_stream()
        if is_even(geometry):
            padded = None
        else:
            shape = (batch, *even(geometry).size, geometry.channels)
            padded = self._cupy.empty(shape, first.dtype)
        if padded is not None and direction != "backward_data":
            pad(first, geometry, out=padded)
            first = padded
        result = out
        if padded is not None and direction == "backward_data":
            result = padded
        elif out.dtype != first.dtype:
            result = self._cupy.empty(out.shape, first.dtype)
        add = accumulate and result is out
        try:
            plan.run(chosen, first, second, result, add, workspace)
        except CudnnError as error:
            if error.unsupported:
                raise Refused(str(error)) from error
            raise
        if result is padded:
            crop(padded, geometry, out=out, accumulate=accumulate)
        elif result is not out:
            self._elementwise.convert(result, out=out, accumulate=accumulate)


def is_even(geometry: ConvGeometry) -> bool:
    """Whether both sides of each axis are padded alike."""
    return all(before == after for before, after in geometry.padding)


def even(geometry: ConvGeometry) -> ConvGeometry:
    """Return the geometry itself, or where it is not even that of an input that has been padded."""
    if is_even(geometry):
        return geometry
    size = tuple(n + sum(p) for n, p in zip(geometry.size, geometry.padding, strict=True))
    return replace(geometry, size=size, padding=((0, 0),) * len(size))


def inside(geometry: ConvGeometry) -> tuple[slice, ...]:
    """Where in a padded input the input is."""
    return tuple(
        slice(before, before + n)
        for n, (before, _) in zip(geometry.size, geometry.padding, strict=True)
    )


def crop(padded: Array, geometry: ConvGeometry, *, out: Array, accumulate: bool) -> None:
    """Copy into `out`, or add to it, what `pad` has taken from there."""
    if accumulate:
        out += padded[:, *inside(geometry)]
    else:
        out[...] = padded[:, *inside(geometry)]


def pad(x: Array, geometry: ConvGeometry, *, out: Array) -> None:
    """Copy `x` (N, *size, C) into `out`, which is larger by the padding, and zeros around it."""
    out[...] = 0
    out[:, *inside(geometry)] = x
