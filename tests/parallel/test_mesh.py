"""Meshes of ranks and the collectives along their axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers.collectives import (
    AllGather,
    AllReduce,
    Collective,
    Messages,
    Redistribute,
    ReduceScatter,
    Sum,
)
from pydtnn.parallel.mesh import Mesh
from tests.each import each

LAYER = SimpleNamespace(name="conv")


def ask(mesh: Mesh, collective: Collective) -> Any:
    return mesh.communicate([(LAYER, collective)])[0].wait()


def test_the_last_axis_has_neighbouring_ranks():
    def rank(comm: Communicator) -> tuple[dict[str, int], int, int]:
        mesh = Mesh(comm, data=2, filter=3)
        return mesh.position, mesh.data.size, mesh.group("filter").rank

    results = run_threads(6, rank)
    assert [r[0] for r in results] == [{"data": d, "filter": f} for d in range(2) for f in range(3)]
    assert [r[1:] for r in results] == [(2, f) for _ in range(2) for f in range(3)]


def test_ranks_of_one_host_are_neighbours_on_the_last_axis():
    def rank(comm: Communicator) -> tuple[int, ...]:
        alone = Mesh(comm, data=4)
        mesh = Mesh(comm, data=2, filter=2)
        place = mesh.position["data"], mesh.position["filter"]
        return alone.data.rank, *place, len(set(mesh.group("filter").hosts))

    places = run_threads(4, rank, hosts=[0, 1, 0, 1])
    assert places == [(0, 0, 0, 1), (2, 1, 0, 1), (1, 0, 1, 1), (3, 1, 1, 1)]


@each("axes", [{"data": 3}, {"filter": 3}, {}, {"data": 2, "filter": 3}])
def test_axes_must_multiply_to_the_ranks(axes):
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="Mesh: axes must multiply to the number of ranks, 4"):
            Mesh(comm, **axes)

    run_threads(4, rank)


def test_an_unknown_axis_is_answered_with_the_known_ones():
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="filter"):
            Mesh(comm, filter=2).group("filtr")

    run_threads(2, rank)


@each("dim", [0, 1, -1])
@each("size", [1, 2, 3])
def test_collectives_compute_what_their_names_say(dim, size):
    whole = np.random.default_rng(0).normal(size=(5, 7, 6))
    bounds = {1: (0, whole.shape[dim]), 2: (0, 2, whole.shape[dim]), 3: (0, 0, 4, whole.shape[dim])}
    cuts = (0, *(7 * (i + 1) // size for i in range(size)))

    def part(r: int, along: int = dim, at: tuple[int, ...] = bounds[size]) -> Any:
        return np.moveaxis(np.moveaxis(whole, along, 0)[at[r] : at[r + 1]], 0, along)

    def rank(comm: Communicator) -> None:
        mesh = Mesh(comm, a=size)
        r, here = comm.rank, bounds[size]
        gathered = ask(mesh, AllGather(part(r), "a", dim=dim, bounds=here))
        assert (gathered == whole).all()
        scattered = ask(mesh, ReduceScatter(whole * (r + 1), "a", dim=dim, bounds=here))
        assert np.allclose(scattered, part(r) * sum(range(1, size + 1)), rtol=1e-14)
        assert ask(mesh, AllReduce(np.ones((2, 3)), "a")).tolist() == [[size] * 3] * 2
        assert ask(mesh, Sum(np.ones(3), ("a", "data"))).tolist() == [size] * 3
        moved = Redistribute(part(r), "a", source=(dim, here), target=(1, cuts))
        assert (ask(mesh, moved) == part(r, 1, cuts)).all()

    run_threads(size, rank)


def test_several_operations_are_in_flight_and_counted_by_layer():
    def rank(comm: Communicator) -> None:
        mesh, other = Mesh(comm, a=2), 1 - comm.rank
        new = np.empty((2, 3), "float32")
        halo = Messages([(np.full((2, 3), comm.rank, "float32"), other)], [(new, other)], "a")
        pending = mesh.communicate([(LAYER, halo)])[0]
        total = mesh.communicate([(LAYER, Sum(np.ones(1), ("a",)))])[0]
        assert total.wait() == 2
        assert (pending.wait()[0] == other).all()
        assert (mesh.traffic["conv"].messages, mesh.traffic["conv"].bytes) == (2, 24 + 8)

    run_threads(2, rank)


@pytest.mark.threads(4)
def test_groups_are_freed_with_the_block_of_a_mesh_unless_an_error_ends_it(comm):
    with Mesh(comm, data=2, filter=2) as mesh:
        group = mesh.group("filter")
    assert group.freed
    mesh = Mesh(comm, data=2, filter=2)
    mesh.__exit__(KeyError, KeyError(), None)
    assert not mesh.group("filter").freed
    mesh.free()
