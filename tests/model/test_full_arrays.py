"""WholeArrays arrays of a partitioned network."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn import Mesh
from pydtnn.layers.initializers import Constant
from pydtnn.layers.parameters import Cut, Parameter, ParameterPart
from pydtnn.layers.statistics import Statistic
from pydtnn.model.full_arrays import FullArrays

W, MEAN = np.arange(15.0).reshape(5, 3), np.arange(5.0)


def parts_on(mesh: Mesh) -> FullArrays:
    """A matrix and statistics that are cut along an axis, and a whole bias."""
    cut = Cut(0, "a", (0, 3, 5))
    own = cut.size(mesh.position)
    w, b = Parameter("fc.w", (own, 3), Constant(0.0)), Parameter("fc.b", (3,), Constant(0.0))
    w.part = ParameterPart((5, 3), (cut,))
    statistic = Statistic("norm", own, 0.1)
    statistic.part = ParameterPart((5,), (cut,))
    return FullArrays(mesh, [w, b], [statistic])


@pytest.mark.threads(4)
def test_parts_are_gathered_by_name_with_any_prefix(comm):
    mesh = Mesh(comm, data=2, a=2)
    whole = parts_on(mesh)
    expected = {
        "velocity/fc.w": W,
        "fc.b": np.ones(3),
        "average/norm.running_mean": MEAN,
        "iterations": 3,
        "other": np.zeros(2),
    }
    own = whole.take(expected)
    assert own["velocity/fc.w"].shape == ((3, 3), (2, 3))[mesh.position["a"]]
    result = whole.gather(own)
    assert list(result) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value)
    assert whole.shapes["fc.w"] == (5, 3)
    assert whole.size == 18
    assert whole.describe() == "18 parameters in 2 arrays"


@pytest.mark.threads(2)
def test_arrays_of_other_shapes_are_kept_on_all_ranks(comm):
    """Also if those of some ranks have the shape of the part, or some ranks have none."""
    mesh = Mesh(comm, a=2)
    whole, rank = parts_on(mesh), comm.rank
    state = {"q/fc.w": np.full((2, 3), rank), "error/fc.w": np.full((3 - rank, 3), rank)}
    if rank == 0:
        state["r/fc.w"] = np.zeros((3, 3))
    result = whole.gather(state)
    assert (result["q/fc.w"] == rank).all()
    assert result["error/fc.w"].shape == (5, 3)
    assert ("r/fc.w" in result) == (rank == 0)


@pytest.mark.threads(4)
def test_arrays_that_only_some_ranks_have_are_completed_in_the_order_of_the_network(comm):
    mesh = Mesh(comm, data=2, stage=2)
    shapes = {"b.w": (2,), "c.w": (3,), "a.w": (1,)}
    names = ["c.w"] if mesh.position["stage"] else ["a.w", "b.w"]
    whole = FullArrays(mesh, [Parameter(n, shapes[n], Constant(0.0)) for n in names], [], shapes)
    own = {f"m/{name}": np.full(shapes[name], len(name) + ord(name[0])) for name in names}
    before = {name: array.copy() for name, array in own.items()}
    result = whole.gather(own | {"step": 4})
    assert list(result) == ["m/b.w", "m/c.w", "m/a.w", "step"]
    for name, shape in shapes.items():
        np.testing.assert_array_equal(result[f"m/{name}"], np.full(shape, 3 + ord(name[0])))
    taken = whole.take(result)
    assert taken.keys() == {*before, "step"}
    for name, array in before.items():
        np.testing.assert_array_equal(taken[name], array)
        np.testing.assert_array_equal(own[name], array)


def test_without_a_mesh_arrays_are_unchanged():
    whole = FullArrays(None, [Parameter("fc.w", (2,), Constant(0.0))], [])
    state = {"fc.w": W, "x": 1}
    assert whole.gather(state) == whole.take(state) == state
    assert not whole.distributed
    report = whole.compare({"fc.w": np.zeros(3), "other": W})
    assert report.mismatched == {"fc.w": ((3,), (2,))}
    assert report.unexpected == ("other",)
