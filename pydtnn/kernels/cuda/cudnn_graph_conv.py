"""Convolutions by cuDNN's graphs: an engine that keeps the plans of each geometry."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.cudnn import Cudnn, CudnnError, Handle
from pydtnn.kernels.cuda.cudnn_engine import CudnnEngine
from pydtnn.kernels.cuda.cudnn_graph import (
    ALIGNMENT,
    OPERATIONS,
    SHIFT,
    SQUARES,
    SUM,
    GraphPlan,
    Target,
    W,
    X,
    Y,
    convolution_graph,
    plans,
)
from pydtnn.kernels.cuda.cudnn_nodes import Node
from pydtnn.kernels.cuda.engine import PLAIN, Passing, Refused
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array

NAMES = ("graph", *(f"graph {number}" for number in range(2, 9)))
"""Algorithms: the plans that cuDNN expects to be the fastest, in this order."""

OPERANDS = {name: [uid for uid, _ in operation.tensors] for name, operation in OPERATIONS.items()}


class GraphConvolutions(CudnnEngine):
    """Its graphs, with plans per direction, geometry, batch and dtype.

    Plans that also add to the output, or do what follows in passing, are made when they are first
    asked for. The parameters are those of `CudnnEngine`.
    """

    def __init__(self, cudnn: Cudnn, cupy: Any, handle: Handle, *given: Any, tf32: bool) -> None:
        super().__init__(cudnn, cupy, handle, *given, tf32=tf32)
        pointer = handle.pointer
        self.target = Target(
            {"OPERATIONGRAPH_HANDLE": pointer}, {}, {"EXECUTION_PLAN_HANDLE": pointer}
        )

    def candidates(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> tuple[str, ...]:
        """Name the plans that there are for the convolution alone."""
        if not self.suits(geometry, batch, dtype.name):
            return ()
        return NAMES[: len(self.plans(direction, geometry, batch, dtype.name))]

    def plans(
        self,
        direction: str,
        geometry: ConvGeometry,
        batch: int,
        dtype: str,
        *,
        accumulate: bool = False,
        passing: Passing = PLAIN,
    ) -> list[GraphPlan]:
        """Return plans, the best guess first; made once. See `convolution_graph`."""
        key = (direction, geometry, batch, dtype, accumulate, passing)
        if key not in self._plans:
            try:
                graph = convolution_graph(
                    *(self._cudnn, self.target, direction, geometry, batch, dtype),
                    accumulate=accumulate,
                    passing=passing,
                )
                tensor_cores = dtype != "float32" or self._tf32
                # kernels for what is done in passing are often compiled now, which takes a while
                most = len(NAMES) if passing == PLAIN else 1
                found = plans(self._cudnn, self.target, graph, most, tensor_cores=tensor_cores)
            except CudnnError as error:
                if not error.unsupported:
                    raise
                found = []
            self._plans[key] = found
        made: list[GraphPlan] = self._plans[key]
        return made

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
        """Compute one direction. See `pydtnn.kernels.cuda.engine.Engine`."""
        batch = len(second if direction == "backward_data" else first)
        result, add = out, accumulate
        if out.dtype != first.dtype:  # cuDNN has no fast engine for a gradient of another type
            result, add = self._cupy.empty(out.shape, first.dtype), False
        found = self.plans(direction, geometry, batch, first.dtype.name, accumulate=add)
        if not found:
            raise Refused(f"cuDNN has no graph for {direction} {geometry} that adds to the output")
        given = dict(zip(OPERANDS[direction], (first, second, result), strict=True))
        self._execute(found[min(NAMES.index(algorithm), len(found) - 1)], given)
        if result is not out:
            self._elementwise.convert(result, out=out, accumulate=accumulate)

    def passes(self, geometry: ConvGeometry, batch: int, dtype: Any, passing: Passing) -> bool:
        """Whether there may be a plan; sums, which are of float32 here, only beside 16 bits.

        Which plans there are, only making them says, and that may take a second.
        """
        if not self.suits(geometry, batch, dtype.name):
            return False
        return not passing.sums or (dtype.itemsize == 2 and geometry.filters % 4 == 0)

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
        """Compute y, and what follows. See `pydtnn.kernels.cuda.engine.PassingEngine`."""
        passing = Passing(shift is not None, relu, sums is not None)
        found = self.plans("forward", geometry, len(x), x.dtype.name, passing=passing)
        if not found:
            raise Refused(f"cuDNN has no graph for forward {geometry} with {passing}")
        given = {X: x, W: w, Y: out}
        if shift is not None:
            given[SHIFT] = shift
        totals = self._cupy.empty((2, geometry.filters if passing.sums else 0), "float32")
        if sums is not None:
            given[SUM], given[SQUARES] = totals
        self._execute(found[0], given)
        if sums is not None:
            sums[:1] = out.size // geometry.filters
            self._elementwise.convert(totals.reshape(-1), out=sums[1:])

    def _execute(self, plan: GraphPlan, arrays: dict[int, Array]) -> None:
        """Launch a plan on the current stream."""
        if any(array.data.ptr % ALIGNMENT for array in arrays.values()):
            raise Refused(f"graphs of cuDNN take arrays that are aligned to {ALIGNMENT} B")
        attributes = {
            "VARIANT_PACK_UNIQUE_IDS": list(arrays),
            "VARIANT_PACK_DATA_POINTERS": [array.data.ptr for array in arrays.values()],
            "VARIANT_PACK_WORKSPACE": self._scratch.take(plan.workspace).data.ptr,
        }
        pack = Node(self._cudnn, "VARIANT_PACK", attributes)
        self._handle.to_current_stream()
        try:
            self._cudnn.call["cudnnBackendExecute"](
                self._handle.pointer, plan.node.pointer, pack.pointer
            )
        except CudnnError as error:
            if error.unsupported:
                raise Refused(str(error)) from error
            raise
