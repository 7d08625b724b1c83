"""Convolutions as graphs of cuDNN: what cuDNN itself says of them, and how they are used."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cuda import cudnn_graph
from pydtnn.kernels.cuda.cudnn import CudnnError
from pydtnn.kernels.cuda.cudnn_graph import (
    DOWN_CONVERTED,
    NAMES,
    NONDETERMINISTIC,
    REDUCED_SUMS,
    WORKSPACE_BYTES,
    GraphConvolutions,
    GraphPlan,
    W,
    X,
    Y,
    plans,
)
from pydtnn.kernels.cuda.engine import PLAIN, Passing, Refused
from pydtnn.kernels.cuda.memory import Scratch
from pydtnn.kernels.reference import ElementwiseKernels
from tests.each import each

GEOMETRY = ConvGeometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 16, 32)


# -- which engines are taken: cuDNN's answers are made up


class Scripted:
    """Stands for `CudnnNode`: a heuristics node proposes what is prepared.

    Parameters
    ----------
    proposals : dict of int to list of (notes, workspace or error)
        By the mode of the heuristics; an error in place of the list is one of the query.
    """

    def __init__(self, proposals: dict[int, Any]) -> None:
        self.proposals = proposals

    def __call__(self, cudnn: Any, kind: str, attributes: dict[str, Any]) -> Any:
        if kind == "ENGINEHEUR":
            found = self.proposals.get(attributes["ENGINEHEUR_MODE"], [])
            if isinstance(found, CudnnError):
                raise found
            return SimpleNamespace(get=lambda *_: [self._proposal(*one) for one in found])
        assert kind == "EXECUTION_PLAN"
        size = attributes["EXECUTION_PLAN_ENGINE_CONFIG"].size
        if isinstance(size, CudnnError):
            raise size
        return SimpleNamespace(get=lambda *_: [size])

    @staticmethod
    def _proposal(notes: set[int], size: Any) -> Any:
        engine = SimpleNamespace(get=lambda *_: sorted(notes))
        return SimpleNamespace(size=size, get=lambda *_: [engine])


def workspaces(monkeypatch: pytest.MonkeyPatch, script: Scripted) -> list[int]:
    monkeypatch.setattr("pydtnn.kernels.cuda.cudnn_graph.CudnnNode", script)
    nothing: Any = SimpleNamespace(graph={}, heuristics={}, plan={})
    found = plans(nothing, nothing, nothing, 4)
    return [plan.workspace for plan in found]


BROKEN = CudnnError("cudnnBackendFinalize", 5000, "no compiler")
UNSUPPORTED = CudnnError("cudnnBackendFinalize", 3002, "shape")
NOTES = [{NONDETERMINISTIC}, {0}, {DOWN_CONVERTED}, set(), {REDUCED_SUMS, 9}, {9}]


@each(
    "proposals, taken",
    [
        ({3: [(notes, size) for size, notes in enumerate(NOTES)]}, [1, 3, 5]),
        ({3: [(set(), s) for s in (BROKEN, WORKSPACE_BYTES + 1, WORKSPACE_BYTES, 7)]}, [-1, 7]),
        ({3: [(set(), size) for size in range(9)]}, [0, 1, 2, 3]),
        ({3: UNSUPPORTED, 2: [(set(), 5)]}, [5]),  # engines for all else
        ({3: UNSUPPORTED, 2: UNSUPPORTED}, []),
    ],
)
def test_deterministic_and_exact_engines_with_little_memory_are_taken(
    monkeypatch, proposals, taken
):
    sizes = [WORKSPACE_BYTES if size < 0 else size for size in taken]
    assert workspaces(monkeypatch, Scripted(proposals)) == sizes
    with pytest.raises(CudnnError, match="broken"):
        workspaces(monkeypatch, Scripted({3: CudnnError("f", 4000, "broken")}))


# -- the engine: what is executed, with which arrays


class Recorded(GraphConvolutions):
    """Keeps what it executes."""

    def __init__(self, *, tf32: bool = True) -> None:
        stream = SimpleNamespace(ptr=0)
        cupy: Any = SimpleNamespace(
            empty=empty, cuda=SimpleNamespace(get_current_stream=lambda: stream)
        )
        nothing: Any = None
        handle: Any = SimpleNamespace(pointer=None, to_current_stream=lambda: None)
        super().__init__(nothing, cupy, handle, ElementwiseKernels(np), Scratch(cupy), tf32=tf32)
        self.executed: list[tuple[Any, dict[int, Any]]] = []

    def _execute(self, plan: GraphPlan, arrays: dict[int, Any]) -> None:
        self.executed.append((plan.node, dict(arrays)))


class Pointed(np.ndarray):
    """An array that tells its address as CuPy's do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def empty(shape: Any, dtype: Any) -> Any:
    return np.zeros(shape, dtype).view(Pointed)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Graphs that were made, each with three plans, whose node is the graph and a number."""
    graphs: list[tuple[Any, ...]] = []

    def graph(cudnn: Any, target: Any, *shape: Any, accumulate: bool, passing: Passing) -> Any:
        graphs.append((*shape, accumulate, passing))
        return graphs[-1]

    def three(cudnn: Any, target: Any, graph: Any, most: int) -> Any:
        return [GraphPlan((graph, i), 64) for i in range(min(most, 3))]  # type: ignore[arg-type]

    monkeypatch.setattr(cudnn_graph, "convolution_graph", graph)
    monkeypatch.setattr(cudnn_graph, "plans", three)
    return graphs


def operands(direction: str, dtype: str) -> list[Any]:
    x, w, y = (4, 8, 8, 16), GEOMETRY.weight_shape, (4, 8, 8, 32)
    shapes = {"forward": (x, w, y), "backward_data": (w, y, x), "backward_filter": (x, y, w)}
    return [empty(shape, dtype) for shape in shapes[direction]]


@pytest.mark.parametrize(
    ("direction", "uids"),
    [("forward", (X, W, Y)), ("backward_data", (W, Y, X)), ("backward_filter", (X, Y, W))],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_plans_are_made_once_and_given_the_arrays_that_they_are_for(
    made, direction, uids, accumulate
):
    engine = Recorded()
    first, second, out = operands(direction, "float32")
    assert engine.candidates(direction, GEOMETRY, 4, out.dtype) == NAMES[:3]
    for name in ("graph 2", "graph 2", "graph"):
        engine.run(*(name, direction, first, second, GEOMETRY), out=out, accumulate=accumulate)
    graph = (direction, GEOMETRY, 4, "float32", accumulate, PLAIN)
    assert [node for node, _ in engine.executed] == [(graph, 1), (graph, 1), (graph, 0)]
    for _, arrays in engine.executed:
        assert all(arrays[uid] is a for uid, a in zip(uids, (first, second, out), strict=True))
    assert made.count(graph) == 1


def test_gradients_with_uneven_padding_and_float32_without_tf32_are_left_to_others(made):
    uneven = replace(GEOMETRY, padding=((1, 1), (0, 1)))
    exact, rounding = Recorded(tf32=False), Recorded()
    for direction in cudnn_graph.OPERATIONS:
        for dtype in map(np.dtype, ("float16", "float32")):
            even = () if dtype == "float32" else NAMES[:3]
            assert exact.candidates(direction, GEOMETRY, 4, dtype) == even
            found = NAMES[:3] if direction == "forward" else ()
            assert rounding.candidates(direction, uneven, 4, dtype) == found
    shift, sums = Passing(shift=True), Passing(sums=True)
    assert rounding.passes(uneven, 4, np.dtype("float32"), shift)
    assert not exact.passes(GEOMETRY, 4, np.dtype("float32"), shift)
    assert not rounding.passes(GEOMETRY, 4, np.dtype("float64"), shift)
    assert rounding.passes(GEOMETRY, 4, np.dtype("float16"), sums)
    assert not rounding.passes(GEOMETRY, 4, np.dtype("float32"), sums)
    halves = replace(GEOMETRY, filters=30)  # whose sums are not aligned
    assert not rounding.passes(halves, 4, np.dtype("float16"), sums)


def test_a_graph_that_cannot_add_to_its_output_is_refused(made, monkeypatch):
    engine = Recorded()
    first, second, out = operands("backward_data", "float32")
    engine.candidates("backward_data", GEOMETRY, 4, out.dtype)
    monkeypatch.setattr(cudnn_graph, "plans", lambda *given, **options: [])
    with pytest.raises(Refused, match="no graph for backward_data 3x3 .* adds to the output"):
        engine.run("graph", "backward_data", first, second, GEOMETRY, out=out, accumulate=True)
    engine.run("graph", "backward_data", first, second, GEOMETRY, out=out)


def test_arrays_that_are_not_aligned_are_refused(made):
    x, w, y = operands("forward", "float32")
    shifted = empty(x.size + 1, "float32")[1:].reshape(x.shape)
    engine = Recorded()
    with pytest.raises(Refused, match="aligned to 16 B"):
        GraphConvolutions._execute(
            engine, engine.plans("forward", GEOMETRY, 4, "float32")[0], {X: shifted, W: w, Y: y}
        )
