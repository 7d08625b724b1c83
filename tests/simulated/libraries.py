"""Stand-ins for cuDNN's convolutions and cuBLAS's products: the reference, as work of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cuda import cudnn_graph
from pydtnn.kernels.cuda.cublas import KINDS, NO, layout
from pydtnn.kernels.cuda.cudnn_conv import Algorithm, CudnnConvolutions, even
from pydtnn.kernels.cuda.cudnn_graph import SHIFT, SQUARES, SUM, GraphPlan
from pydtnn.kernels.cuda.engine import PLAIN, Passing, Refused
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import ConvKernels
from tests.simulated.cupy.array import DeviceArray

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy

WORKSPACE = 64  # bytes


def check_product(a: Any, b: Any, out: Any) -> None:
    """Assert that cuBLAS takes these arrays."""
    assert a.dtype == b.dtype
    assert {a.dtype.name, out.dtype.name} <= KINDS.keys()
    assert out.dtype in (a.dtype, arithmetic(a.dtype))
    assert layout(out)[0] == NO
    for factor in (a, b):
        layout(factor)


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
    """Compute what `Products` computes; products of 16 bits are added up in float32."""
    if out.size:
        check_product(a, b, out)
        kind = arithmetic(a.dtype)
        product = a.astype(kind) @ b.astype(kind)
        out[...] = out.astype(kind) + product if accumulate else product


class Products:
    """Stands for `pydtnn.kernels.cuda.cublas.Products`."""

    def __init__(self, library: Any, xp: SimulatedCupy, *, tf32: bool = False) -> None:
        self._xp = xp

    def __call__(
        self, a: DeviceArray, b: DeviceArray, out: DeviceArray, accumulate: bool = False
    ) -> None:
        if out.size:
            check_product(a, b, out)
            first, second, into = a.memory, b.memory, out.memory
            arrays = (a, b, out)
            self._xp.put(
                lambda: multiply(first, second, into, accumulate), [x.block for x in arrays]
            )


def convolve(
    direction: str,
    geometry: ConvGeometry,
    first: np.ndarray,
    second: np.ndarray,
    out: np.ndarray,
    *,
    accumulate: bool,
    shift: np.ndarray | None = None,
    relu: bool = False,
    sums: Sequence[np.ndarray] = (),
) -> None:
    """Compute what the reference computes, rounded once, and what follows in passing."""
    assert first.dtype == second.dtype == out.dtype
    kind = arithmetic(out.dtype)
    assert all(array.dtype == kind for array in (*sums, *([] if shift is None else [shift])))
    one, other, result = first.astype(kind), second.astype(kind), np.empty(out.shape, kind)
    conv = ConvKernels(np)
    if direction == "forward":
        conv.forward(one, other, None, geometry, out=result)
    elif direction == "backward_data":
        conv.backward_data(other, one, geometry, out=result)
    else:
        conv.backward_filter(one, other, geometry, out=result)
    result = result if shift is None else result + shift.reshape(-1)
    result = np.maximum(result, 0) if relu else result
    out[...] = out.astype(kind) + result if accumulate else result
    for power, total in enumerate(sums, start=1):
        rows = out.astype(kind).reshape(-1, out.shape[-1])
        total[...] = (rows**power).sum(axis=0).reshape(total.shape)


def enqueue(
    xp: SimulatedCupy,
    direction: str,
    geometry: ConvGeometry,
    first: DeviceArray,
    second: DeviceArray,
    out: DeviceArray,
    workspace: DeviceArray,
    *,
    shift: DeviceArray | None = None,
    sums: Sequence[DeviceArray] = (),
    **options: Any,
) -> None:
    """Make a convolution work of the current stream; it overwrites its workspace."""
    arrays = [first, second, out]
    operands = [array.memory for array in arrays]
    biases, scratch = None if shift is None else shift.memory, workspace.memory
    totals = [total.memory for total in sums]

    def call() -> None:
        scratch.fill(0)
        convolve(direction, geometry, *operands, shift=biases, sums=totals, **options)

    arrays += [workspace, *sums, *([] if shift is None else [shift])]
    xp.put(call, [array.block for array in arrays])


class Plan:
    """Stands for a plan of cuDNN's older interface."""

    def __init__(self, xp: SimulatedCupy, direction: str, geometry: ConvGeometry) -> None:
        self._xp, self._direction, self._geometry = xp, direction, geometry
        names = enumerate(("implicit gemm", "winograd"))
        self.algorithms = {name: Algorithm(i, 0, WORKSPACE) for i, name in names}

    def run(
        self,
        algorithm: Algorithm,
        first: DeviceArray,
        second: DeviceArray,
        out: DeviceArray,
        accumulate: bool,
        workspace: DeviceArray,
    ) -> None:
        assert workspace.nbytes >= algorithm.workspace
        given = (self._direction, self._geometry, first, second, out, workspace)
        enqueue(self._xp, *given, accumulate=accumulate)


class Convolutions(CudnnConvolutions):
    """Stands for cuDNN's older interface; refuses what cuDNN refuses."""

    def _make_plan(self, direction: str, geometry: ConvGeometry, batch: int, dtype: str) -> Any:
        assert geometry == even(geometry)
        if not self.suits(geometry, batch, dtype):
            return None
        return Plan(self._cupy, direction, geometry)


class GraphConvolutions(cudnn_graph.GraphConvolutions):
    """Stands for cuDNN's graphs, which follow a convolution by biases, ReLU and statistics."""

    def plans(
        self,
        direction: str,
        geometry: ConvGeometry,
        batch: int,
        dtype: str,
        *,
        accumulate: bool = False,
        passing: Passing = PLAIN,
    ) -> Any:
        node: Any = (direction, geometry, accumulate, passing)
        return [GraphPlan(node, WORKSPACE)]

    def _execute(self, plan: GraphPlan, arrays: dict[int, DeviceArray]) -> None:
        if any(array.data.ptr % cudnn_graph.ALIGNMENT for array in arrays.values()):
            raise Refused("misaligned")
        direction, geometry, accumulate, passing = cast(Any, plan.node)
        first, second, out = (arrays[uid] for uid in cudnn_graph.OPERANDS[direction])
        enqueue(
            *(self._cupy, direction, geometry, first, second, out),
            self._scratch.take(plan.workspace),
            accumulate=accumulate,
            shift=arrays.get(SHIFT),
            relu=passing.relu,
            sums=[arrays[uid] for uid in (SUM, SQUARES) if uid in arrays],
        )


class Handle:
    """Stands for cuDNN's handle."""

    def __init__(self, *args: Any) -> None:
        self.pointer = None

    def to_current_stream(self) -> None:
        pass
