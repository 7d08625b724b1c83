"""Convolutions as graphs of cuDNN's operations, which it may carry out in one kernel.

A graph is made of descriptors: tensors, operations on them, the graph itself. cuDNN's heuristics
return engines with settings for it, the best guess first; with one of them it becomes a plan that
can be run on any arrays. This is the interface that cuDNN is developed for. It has kernels that the
older one (`cudnn_conv.py`) lacks: it pads unevenly, adds biases, cuts off below 0 and takes the
sums of batch norm in passing.

Making a plan takes about a millisecond, or much more where cuDNN compiles a kernel for it; running
one some microseconds.

References
----------
NVIDIA, "cuDNN backend API reference", library cudnn_graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from ctypes import byref, c_bool, c_float, c_int, c_int64, c_void_p
from math import prod
from typing import Any, NamedTuple

from pydtnn.kernels.cuda.cudnn import (
    CROSS_CORRELATION,
    DATA_TYPES,
    Cudnn,
    CudnnError,
    Handle,
    two_axes,
)
from pydtnn.kernels.cuda.cudnn_conv import CudnnEngine, is_even
from pydtnn.kernels.cuda.engine import PLAIN, Passing, Refused
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array

# Descriptors of cuDNN's graphs: objects of some kind with attributes of some type.
#
# All are made alike: created, given their attributes by number, and finalized, upon which cuDNN
# checks them. The numbers are those of the header cudnn_graph.h, to which the tests compare them.
#
# References
# ----------
# NVIDIA, "cuDNN backend API reference", library cudnn_graph.

KINDS = {
    "POINTWISE": 0,
    "CONVOLUTION": 1,
    "ENGINE": 2,
    "ENGINECFG": 3,
    "ENGINEHEUR": 4,
    "EXECUTION_PLAN": 5,
    "OPERATION_CONVOLUTION_FORWARD": 10,
    "OPERATION_CONVOLUTION_BACKWARD_FILTER": 11,
    "OPERATION_CONVOLUTION_BACKWARD_DATA": 12,
    "OPERATION_POINTWISE": 13,
    "OPERATION_GEN_STATS": 14,
    "OPERATIONGRAPH": 15,
    "VARIANT_PACK": 16,
    "TENSOR": 17,
}
"""Descriptors that we use (CUDNN_BACKEND_*_DESCRIPTOR)."""


class Type(NamedTuple):
    """Type of an attribute (CUDNN_TYPE_*): cuDNN's number, and what its elements are in C."""

    number: int
    element: Any


HANDLE, DATA_TYPE, BOOLEAN = Type(0, c_void_p), Type(1, c_int), Type(2, c_bool)
INT64, FLOAT, VOID_PTR = Type(3, c_int64), Type(4, c_float), Type(6, c_void_p)
CONVOLUTION_MODE, HEUR_MODE, NUMERICAL_NOTE = Type(7, c_int), Type(8, c_int), Type(11, c_int)
POINTWISE_MODE, DESCRIPTOR, GENSTATS_MODE = Type(14, c_int), Type(15, c_void_p), Type(16, c_int)

ATTRIBUTES = {
    "POINTWISE_MODE": (0, POINTWISE_MODE),
    "POINTWISE_MATH_PREC": (1, DATA_TYPE),
    "CONVOLUTION_COMP_TYPE": (100, DATA_TYPE),
    "CONVOLUTION_CONV_MODE": (101, CONVOLUTION_MODE),
    "CONVOLUTION_DILATIONS": (102, INT64),
    "CONVOLUTION_FILTER_STRIDES": (103, INT64),
    "CONVOLUTION_POST_PADDINGS": (104, INT64),
    "CONVOLUTION_PRE_PADDINGS": (105, INT64),
    "CONVOLUTION_SPATIAL_DIMS": (106, INT64),
    "ENGINEHEUR_MODE": (200, HEUR_MODE),
    "ENGINEHEUR_OPERATION_GRAPH": (201, DESCRIPTOR),
    "ENGINEHEUR_RESULTS": (202, DESCRIPTOR),
    "ENGINECFG_ENGINE": (300, DESCRIPTOR),
    "EXECUTION_PLAN_HANDLE": (400, HANDLE),
    "EXECUTION_PLAN_ENGINE_CONFIG": (401, DESCRIPTOR),
    "EXECUTION_PLAN_WORKSPACE_SIZE": (402, INT64),
    "OPERATION_CONVOLUTION_FORWARD_ALPHA": (700, FLOAT),
    "OPERATION_CONVOLUTION_FORWARD_BETA": (701, FLOAT),
    "OPERATION_CONVOLUTION_FORWARD_CONV_DESC": (702, DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_W": (703, DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_X": (704, DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_Y": (705, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_ALPHA": (706, FLOAT),
    "OPERATION_CONVOLUTION_BWD_DATA_BETA": (707, FLOAT),
    "OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC": (708, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_W": (709, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_DX": (710, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_DY": (711, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_ALPHA": (712, FLOAT),
    "OPERATION_CONVOLUTION_BWD_FILTER_BETA": (713, FLOAT),
    "OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC": (714, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_DW": (715, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_X": (716, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_DY": (717, DESCRIPTOR),
    "OPERATION_POINTWISE_PW_DESCRIPTOR": (750, DESCRIPTOR),
    "OPERATION_POINTWISE_XDESC": (751, DESCRIPTOR),
    "OPERATION_POINTWISE_BDESC": (752, DESCRIPTOR),
    "OPERATION_POINTWISE_YDESC": (753, DESCRIPTOR),
    "OPERATION_GENSTATS_MODE": (770, GENSTATS_MODE),
    "OPERATION_GENSTATS_MATH_PREC": (771, DATA_TYPE),
    "OPERATION_GENSTATS_XDESC": (772, DESCRIPTOR),
    "OPERATION_GENSTATS_SUMDESC": (773, DESCRIPTOR),
    "OPERATION_GENSTATS_SQSUMDESC": (774, DESCRIPTOR),
    "OPERATIONGRAPH_HANDLE": (800, HANDLE),
    "OPERATIONGRAPH_OPS": (801, DESCRIPTOR),
    "TENSOR_BYTE_ALIGNMENT": (900, INT64),
    "TENSOR_DATA_TYPE": (901, DATA_TYPE),
    "TENSOR_DIMENSIONS": (902, INT64),
    "TENSOR_STRIDES": (903, INT64),
    "TENSOR_UNIQUE_ID": (906, INT64),
    "TENSOR_IS_VIRTUAL": (907, BOOLEAN),
    "VARIANT_PACK_UNIQUE_IDS": (1000, INT64),
    "VARIANT_PACK_DATA_POINTERS": (1001, VOID_PTR),
    "VARIANT_PACK_WORKSPACE": (1003, VOID_PTR),
    "ENGINE_NUMERICAL_NOTE": (1303, NUMERICAL_NOTE),
}
"""Attributes that we set or get (CUDNN_ATTR_*), with their types."""


class CudnnNode:
    """A descriptor, finalized; destroyed with the last reference to it.

    Parameters
    ----------
    cudnn : Cudnn
    kind : str
        One of `KINDS`.
    attributes : mapping, optional
        By the names of `ATTRIBUTES`: a value, or a sequence of values. Without any, the descriptor
        is left empty, to be filled in by `get` of another one.
    """

    def __init__(
        self, cudnn: Cudnn, kind: str, attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._cudnn = cudnn
        self._parts = attributes  # alive as long as what was made of them
        self.pointer = c_void_p()
        cudnn.call["cudnnBackendCreateDescriptor"](KINDS[kind], byref(self.pointer))
        destroy = cudnn.call["cudnnBackendDestroyDescriptor"]
        # when the interpreter ends, the driver may have ended before
        weakref.finalize(self, destroy, self.pointer).atexit = False
        if attributes:
            for name, value in attributes.items():
                self._set(name, value)
            cudnn.call["cudnnBackendFinalize"](self.pointer)

    def _set(self, name: str, value: Any) -> None:
        number, kind = ATTRIBUTES[name]
        values = value if isinstance(value, (list, tuple, bytes)) else [value]
        elements = [v.pointer if isinstance(v, CudnnNode) else v for v in values]
        array = (kind.element * len(elements))(*elements)
        self._cudnn.call["cudnnBackendSetAttribute"](
            self.pointer, number, kind.number, len(elements), array
        )

    def get(self, name: str, most: int, of: str = "") -> list[Any]:
        """Return the values of an attribute, so many at most; descriptors of the kind `of`."""
        number, kind = ATTRIBUTES[name]
        count, nodes = c_int64(), [CudnnNode(self._cudnn, of) for _ in range(most if of else 0)]
        array = (kind.element * most)(*(node.pointer for node in nodes))
        self._cudnn.call["cudnnBackendGetAttribute"](
            self.pointer, number, kind.number, most, byref(count), array
        )
        return (nodes or list(array))[: count.value]


ALIGNMENT = 16
"""Bytes to which all arrays are aligned, so that vectors can be loaded."""

WORKSPACE_BYTES = 1 << 30
"""Engines that need more are left out."""

MAX_ENGINES = 32
"""Proposals for a graph that are looked at, of each kind."""

HEURISTICS = (3, 2)
"""Where proposals come from (cudnnBackendHeurMode_t): a decision tree, then the engines that are
there for all else."""

DOWN_CONVERTED, REDUCED_SUMS, NONDETERMINISTIC = 1, 2, 4
"""What an engine says about its arithmetic (cudnnBackendNumericalNote_t)."""

UNWANTED = frozenset({DOWN_CONVERTED, REDUCED_SUMS, NONDETERMINISTIC})
"""Notes of engines that are not used."""

ADD, RELU, SUM_SQUARES = 0, 100, 0
"""Operations on elements (cudnnPointwiseMode_t), and the statistics (cudnnGenStatsMode_t)."""

X, W, Y, SHIFT, SUM, SQUARES, FIRST_VIRTUAL = 1, 2, 3, 4, 5, 6, 7
"""What tensors of a graph are called."""


class ConvOperation(NamedTuple):
    """A convolution in one direction: kind of the descriptor, and how its attributes begin.

    The tensors are ids with the attributes that take them, the output last.
    """

    kind: str
    prefix: str
    tensors: tuple[tuple[int, str], ...]


OPERATIONS = {
    "forward": ConvOperation(
        "OPERATION_CONVOLUTION_FORWARD",
        "OPERATION_CONVOLUTION_FORWARD",
        ((X, "X"), (W, "W"), (Y, "Y")),
    ),
    "backward_data": ConvOperation(
        "OPERATION_CONVOLUTION_BACKWARD_DATA",
        "OPERATION_CONVOLUTION_BWD_DATA",
        ((W, "W"), (Y, "DY"), (X, "DX")),
    ),
    "backward_filter": ConvOperation(
        "OPERATION_CONVOLUTION_BACKWARD_FILTER",
        "OPERATION_CONVOLUTION_BWD_FILTER",
        ((X, "X"), (Y, "DY"), (W, "DW")),
    ),
}


class Target(NamedTuple):
    """Which GPU graphs, proposals and plans are for: attributes that say so."""

    graph: dict[str, Any]
    heuristics: dict[str, Any]
    plan: dict[str, Any]


def convolution_graph(
    cudnn: Cudnn,
    target: Target,
    direction: str,
    geometry: ConvGeometry,
    batch: int,
    dtype: str,
    *,
    accumulate: bool = False,
    passing: Passing = PLAIN,
) -> CudnnNode:
    """Describe a convolution and what follows in passing, on contiguous arrays.

    Parameters
    ----------
    cudnn : Cudnn
    target : Target
    direction : str
        One of `OPERATIONS`.
    geometry : ConvGeometry
    batch : int
    dtype : str
        Of all arrays but shift and sums, which have the type that is computed with.
    accumulate : bool
        Whether the output is added to what is there.
    passing : Passing
        With "forward" only.

    Raises
    ------
    CudnnError
        If cuDNN has no such graph.
    """
    element, inner = DATA_TYPES[dtype], DATA_TYPES["float64" if dtype == "float64" else "float32"]
    kind, prefix, tensors = OPERATIONS[direction]
    shapes = {
        X: (batch, geometry.channels, *geometry.size),
        W: (geometry.filters, geometry.channels // geometry.groups, *geometry.kernel),
        Y: (batch, geometry.filters, *geometry.output),
    }
    per_channel = (1, geometry.filters, *(1 for _ in geometry.output))
    after = [name for name in ("shift", "relu") if getattr(passing, name)]
    result = tensors[-1][0]
    # what each operation returns: only the last of them is in memory
    outputs = [_tensor(cudnn, FIRST_VIRTUAL + i, shapes[Y], inner) for i in range(len(after))]
    outputs.append(_tensor(cudnn, result, shapes[result], element, virtual=False))

    convolution = {
        f"{prefix}_ALPHA": 1.0,
        f"{prefix}_BETA": float(accumulate),
        f"{prefix}_CONV_DESC": _windows(cudnn, geometry, inner),
        f"{prefix}_{tensors[-1][1]}": outputs[0],
    }
    for uid, name in tensors[:-1]:
        convolution[f"{prefix}_{name}"] = _tensor(cudnn, uid, shapes[uid], element, virtual=False)
    operations = [CudnnNode(cudnn, kind, convolution)]
    for name, x, y in zip(after, outputs, outputs[1:], strict=False):
        mode = {"POINTWISE_MODE": RELU if name == "relu" else ADD, "POINTWISE_MATH_PREC": inner}
        pointwise = {
            "OPERATION_POINTWISE_PW_DESCRIPTOR": CudnnNode(cudnn, "POINTWISE", mode),
            "OPERATION_POINTWISE_XDESC": x,
            "OPERATION_POINTWISE_YDESC": y,
        }
        if name == "shift":
            biases = _tensor(cudnn, SHIFT, per_channel, inner, virtual=False)
            pointwise["OPERATION_POINTWISE_BDESC"] = biases
        operations.append(CudnnNode(cudnn, "OPERATION_POINTWISE", pointwise))
    if passing.sums:
        sums = [_tensor(cudnn, uid, per_channel, inner, virtual=False) for uid in (SUM, SQUARES)]
        statistics = {
            "OPERATION_GENSTATS_MODE": SUM_SQUARES,
            "OPERATION_GENSTATS_MATH_PREC": inner,
            "OPERATION_GENSTATS_XDESC": outputs[-1],
            "OPERATION_GENSTATS_SUMDESC": sums[0],
            "OPERATION_GENSTATS_SQSUMDESC": sums[1],
        }
        operations.append(CudnnNode(cudnn, "OPERATION_GEN_STATS", statistics))
    return CudnnNode(cudnn, "OPERATIONGRAPH", {**target.graph, "OPERATIONGRAPH_OPS": operations})


def _tensor(
    cudnn: Cudnn, uid: int, shape: tuple[int, ...], kind: int, *, virtual: bool = True
) -> CudnnNode:
    """Describe an array (N, C, ...) of which the memory is (N, ..., C), or which is not stored."""
    dims = (*shape[:2], *two_axes(shape[2:], 1))
    along = [dims[1] * prod(dims[axis + 1 :]) for axis in range(2, len(dims))]
    attributes = {
        "TENSOR_BYTE_ALIGNMENT": ALIGNMENT,
        "TENSOR_DATA_TYPE": kind,
        "TENSOR_DIMENSIONS": dims,
        "TENSOR_STRIDES": (prod(dims[1:]), 1, *along),
        "TENSOR_UNIQUE_ID": uid,
        "TENSOR_IS_VIRTUAL": virtual,
    }
    return CudnnNode(cudnn, "TENSOR", attributes)


def _windows(cudnn: Cudnn, geometry: ConvGeometry, inner: int) -> CudnnNode:
    """Describe paddings, strides and dilations."""
    padding = two_axes([b for b, _ in geometry.padding], 0)
    attributes = {
        "CONVOLUTION_COMP_TYPE": inner,
        "CONVOLUTION_CONV_MODE": CROSS_CORRELATION,
        "CONVOLUTION_SPATIAL_DIMS": len(padding),
        "CONVOLUTION_PRE_PADDINGS": padding,
        "CONVOLUTION_POST_PADDINGS": two_axes([a for _, a in geometry.padding], 0),
        "CONVOLUTION_FILTER_STRIDES": two_axes(geometry.stride, 1),
        "CONVOLUTION_DILATIONS": two_axes(geometry.dilation, 1),
    }
    return CudnnNode(cudnn, "CONVOLUTION", attributes)


class GraphPlan(NamedTuple):
    """A graph with an engine that carries it out, and the bytes of scratch memory it needs."""

    node: CudnnNode
    workspace: int


def plans(cudnn: Cudnn, target: Target, graph: CudnnNode, most: int) -> list[GraphPlan]:
    """Make plans for a graph, the one first that cuDNN expects to be the fastest.

    Engines whose sums depend on the order in which threads arrive are left out, and those that
    compute with less than the types say.

    Parameters
    ----------
    cudnn : Cudnn
    target : Target
    graph : Node
    most : int
        Plans that are wanted.
    """
    found: list[GraphPlan] = []
    for mode in HEURISTICS:
        asked = {"ENGINEHEUR_OPERATION_GRAPH": graph, "ENGINEHEUR_MODE": mode, **target.heuristics}
        try:
            heuristics = CudnnNode(cudnn, "ENGINEHEUR", asked)
            proposals = heuristics.get("ENGINEHEUR_RESULTS", MAX_ENGINES, "ENGINECFG")
        except CudnnError as error:
            if error.unsupported:
                continue
            raise
        for proposal in proposals:
            if len(found) == most:
                return found
            engine = proposal.get("ENGINECFG_ENGINE", 1, "ENGINE")[0]
            notes = engine.get("ENGINE_NUMERICAL_NOTE", MAX_ENGINES)
            if UNWANTED.isdisjoint(notes):
                found += _plan(cudnn, target, proposal)
    return found


def _plan(cudnn: Cudnn, target: Target, proposal: CudnnNode) -> Sequence[GraphPlan]:
    """Make a plan, or none where the engine turns out not to suit, or to need too much memory."""
    try:
        chosen = {"EXECUTION_PLAN_ENGINE_CONFIG": proposal}
        node = CudnnNode(cudnn, "EXECUTION_PLAN", {**target.plan, **chosen})
    except CudnnError:  # of whatever kind: some compile kernels now, and nothing has run yet
        return []
    (workspace,) = node.get("EXECUTION_PLAN_WORKSPACE_SIZE", 1)
    return [GraphPlan(node, workspace)] if workspace <= WORKSPACE_BYTES else []


NAMES = ("graph", *(f"graph {number}" for number in range(2, 9)))
"""Algorithms: the plans that cuDNN expects to be the fastest, in this order."""

OPERANDS = {name: [uid for uid, _ in operation.tensors] for name, operation in OPERATIONS.items()}


class GraphConvolutions(CudnnEngine):
    """Its graphs, with plans per direction, geometry, batch and dtype.

    Plans that also add to the output, or do what follows in passing, are made when they are first
    asked for. The parameters are those of `CudnnEngine`.

    Two kinds of convolutions are left to the older interface, because some of the engines that
    cuDNN 9.19 proposes for them on an H100 return wrong results, without a note that tells which:

    - gradients with asymmetric padding: some engines ignore the padding at the end of an axis;
    - float32 without TF32: an engine for the gradient of the filters has errors as large as TF32's.
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
        if not self._reliable(direction, geometry, batch, dtype.name):
            return ()
        return NAMES[: len(self.plans(direction, geometry, batch, dtype.name))]

    def _reliable(self, direction: str, geometry: ConvGeometry, batch: int, dtype: str) -> bool:
        """Whether cuDNN may be asked, and all engines that it proposes compute what they should."""
        exact = dtype == "float32" and not self._tf32
        symmetric = direction == "forward" or is_even(geometry)
        return self.suits(geometry, batch, dtype) and symmetric and not exact

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
                # kernels for what is done in passing are often compiled now, which takes a while
                most = len(NAMES) if passing == PLAIN else 1
                found = plans(self._cudnn, self.target, graph, most)
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
        """Compute one direction. See `pydtnn.kernels.cuda.engine.ConvEngine`."""
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
        if not self._reliable("forward", geometry, batch, dtype.name):
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
        pack = CudnnNode(self._cudnn, "VARIANT_PACK", attributes)
        self._handle.to_current_stream()
        try:
            self._cudnn.call["cudnnBackendExecute"](
                self._handle.pointer, plan.node.pointer, pack.pointer
            )
        except CudnnError as error:
            if error.unsupported:
                raise Refused(str(error)) from error
            raise
