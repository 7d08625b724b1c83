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

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from pydtnn.kernels.cuda.cudnn import CROSS_CORRELATION, DATA_TYPES, Cudnn, CudnnError, two_axes
from pydtnn.kernels.cuda.cudnn_nodes import Node
from pydtnn.kernels.cuda.engine import PLAIN, Passing
from pydtnn.kernels.geometry import ConvGeometry

ALIGNMENT = 16
"""Bytes to which all arrays are aligned, so that vectors can be loaded."""

WORKSPACE_BYTES = 1 << 30
"""Engines that need more are left out."""

MOST_ENGINES = 32
"""Proposals for a graph that are looked at, of each kind."""

HEURISTICS = (3, 2)
"""Where proposals come from (cudnnBackendHeurMode_t): a decision tree, then the engines that are
there for all else."""

TENSOR_CORE, DOWN_CONVERTED, REDUCED_SUMS, NONDETERMINISTIC = 0, 1, 2, 4
"""What an engine says about its arithmetic (cudnnBackendNumericalNote_t)."""

ADD, RELU, SUM_SQUARES = 0, 100, 0
"""Operations on elements (cudnnPointwiseMode_t), and the statistics (cudnnGenStatsMode_t)."""

X, W, Y, SHIFT, SUM, SQUARES, FIRST_VIRTUAL = 1, 2, 3, 4, 5, 6, 7
"""What tensors of a graph are called."""


class Operation(NamedTuple):
    """A convolution in one direction: kind of the descriptor, and how its attributes begin.

    The tensors are ids with the attributes that take them, the output last.
    """

    kind: str
    prefix: str
    tensors: tuple[tuple[int, str], ...]


OPERATIONS = {
    "forward": Operation(
        "OPERATION_CONVOLUTION_FORWARD",
        "OPERATION_CONVOLUTION_FORWARD",
        ((X, "X"), (W, "W"), (Y, "Y")),
    ),
    "backward_data": Operation(
        "OPERATION_CONVOLUTION_BACKWARD_DATA",
        "OPERATION_CONVOLUTION_BWD_DATA",
        ((W, "W"), (Y, "DY"), (X, "DX")),
    ),
    "backward_filter": Operation(
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
) -> Node:
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
    operations = [Node(cudnn, kind, convolution)]
    for name, x, y in zip(after, outputs, outputs[1:], strict=False):
        mode = {"POINTWISE_MODE": RELU if name == "relu" else ADD, "POINTWISE_MATH_PREC": inner}
        pointwise = {
            "OPERATION_POINTWISE_PW_DESCRIPTOR": Node(cudnn, "POINTWISE", mode),
            "OPERATION_POINTWISE_XDESC": x,
            "OPERATION_POINTWISE_YDESC": y,
        }
        if name == "shift":
            biases = _tensor(cudnn, SHIFT, per_channel, inner, virtual=False)
            pointwise["OPERATION_POINTWISE_BDESC"] = biases
        operations.append(Node(cudnn, "OPERATION_POINTWISE", pointwise))
    if passing.sums:
        sums = [_tensor(cudnn, uid, per_channel, inner, virtual=False) for uid in (SUM, SQUARES)]
        statistics = {
            "OPERATION_GENSTATS_MODE": SUM_SQUARES,
            "OPERATION_GENSTATS_MATH_PREC": inner,
            "OPERATION_GENSTATS_XDESC": outputs[-1],
            "OPERATION_GENSTATS_SUMDESC": sums[0],
            "OPERATION_GENSTATS_SQSUMDESC": sums[1],
        }
        operations.append(Node(cudnn, "OPERATION_GEN_STATS", statistics))
    return Node(cudnn, "OPERATIONGRAPH", {**target.graph, "OPERATIONGRAPH_OPS": operations})


def _tensor(
    cudnn: Cudnn, uid: int, shape: tuple[int, ...], kind: int, *, virtual: bool = True
) -> Node:
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
    return Node(cudnn, "TENSOR", attributes)


def _windows(cudnn: Cudnn, geometry: ConvGeometry, inner: int) -> Node:
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
    return Node(cudnn, "CONVOLUTION", attributes)


class GraphPlan(NamedTuple):
    """A graph with an engine that carries it out, and the bytes of scratch memory it needs."""

    node: Node
    workspace: int


def plans(
    cudnn: Cudnn, target: Target, graph: Node, most: int, *, tensor_cores: bool
) -> list[GraphPlan]:
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
    tensor_cores : bool
        Whether tensor cores may be used: they round float32 to TF32.
    """
    unwanted = {DOWN_CONVERTED, REDUCED_SUMS, NONDETERMINISTIC}
    if not tensor_cores:
        unwanted.add(TENSOR_CORE)
    found: list[GraphPlan] = []
    for mode in HEURISTICS:
        asked = {"ENGINEHEUR_OPERATION_GRAPH": graph, "ENGINEHEUR_MODE": mode, **target.heuristics}
        try:
            heuristics = Node(cudnn, "ENGINEHEUR", asked)
            proposals = heuristics.get("ENGINEHEUR_RESULTS", MOST_ENGINES, "ENGINECFG")
        except CudnnError as error:
            if error.unsupported:
                continue
            raise
        for proposal in proposals:
            if len(found) == most:
                return found
            engine = proposal.get("ENGINECFG_ENGINE", 1, "ENGINE")[0]
            notes = engine.get("ENGINE_NUMERICAL_NOTE", MOST_ENGINES)
            if unwanted.isdisjoint(notes):
                found += _plan(cudnn, target, proposal)
    return found


def _plan(cudnn: Cudnn, target: Target, proposal: Node) -> Sequence[GraphPlan]:
    """Make a plan, or none where the engine turns out not to suit, or to need too much memory."""
    try:
        chosen = {"EXECUTION_PLAN_ENGINE_CONFIG": proposal}
        node = Node(cudnn, "EXECUTION_PLAN", {**target.plan, **chosen})
    except CudnnError:  # of whatever kind: some compile kernels now, and nothing has run yet
        return []
    (workspace,) = node.get("EXECUTION_PLAN_WORKSPACE_SIZE", 1)
    return [GraphPlan(node, workspace)] if workspace <= WORKSPACE_BYTES else []
