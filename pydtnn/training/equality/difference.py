"""The first array in which ranks differ: since which step, on which ranks, and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pydtnn.comm.agree import name_ranks
from pydtnn.comm.arrays import to_host
from pydtnn.comm.communicator import Communicator
from pydtnn.training.equality.arrays import Watched
from pydtnn.training.equality.hashes import Hashes
from pydtnn.utils.errors import AgreedError

Places = Sequence[Mapping[str, int]]
"""Position of each rank along the axes of the mesh."""


def groups(places: Places, cut: Sequence[str]) -> list[list[int]]:
    """Return the ranks that have the same values of an array that is cut along some axes.

    >>> groups([{"data": 0, "filter": 0}, {"data": 0, "filter": 1}], ["filter"])
    [[0], [1]]
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(tuple(place[axis] for axis in cut), []).append(rank)
    return [*found.values()]


@dataclass
class Difference:
    """An array that is not the same on all ranks that should have it in common.

    Attributes
    ----------
    order : int
        Position of the array in the network.
    name : str
    ranks : list of int
        Those that must have the same values.
    before, first : int
        The last step after which they were the same, -1 if none, and the first with a difference.
    others : list of int
        The ranks that differ from most; empty if there is no majority.
    """

    order: int
    name: str
    ranks: list[int]
    before: int
    first: int
    others: list[int]


def find_differences(
    comm: Communicator, places: Places, watched: Sequence[Watched], hashes: Hashes
) -> list[Difference]:
    """Return what differs, in the order in which it began to. Collective: all ranks call it."""
    own = {w.name: (w.cut, hashes.of(index)) for index, w in enumerate(watched)}
    last = comm.gather_object([(name, cut, [*by.values()][-1]) for name, (cut, by) in own.items()])
    found = []
    held = [{name: value for name, _, value in rank} for rank in last]
    known = {name: cut for rank in last for name, cut, _ in rank}
    for order, (name, cut) in enumerate(known.items()):
        for members in groups(places, cut):
            members = [rank for rank in members if name in held[rank]]
            if len({held[rank][name] for rank in members}) > 1:
                found.append((order, name, members))
    names = {name for _, name, _ in found}
    courses = comm.gather_object({name: by for name, (_, by) in own.items() if name in names})
    differences = [
        _difference(order, name, {rank: courses[rank][name] for rank in members})
        for order, name, members in found
    ]
    return sorted(differences, key=lambda d: (d.first, d.order))


def _difference(order: int, name: str, courses: Mapping[int, Mapping[int, int]]) -> Difference:
    before, (some, *rest) = -1, courses.values()
    for first in [step for step in some if all(step in course for course in rest)]:
        counts = Counter(course[first] for course in courses.values())
        if len(counts) > 1:
            break
        before = first
    (usual, most), (_, second) = counts.most_common(2)
    others = [rank for rank, course in courses.items() if course[first] != usual]
    return Difference(order, name, [*courses], before, first, others if most > second else [])


def error_of(
    comm: Communicator, difference: Difference, watched: Sequence[Watched], more: int, safe: int
) -> AgreedError:
    """Return the error that describes a difference. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    difference : Difference
    watched : sequence of Watched
    more : int
        Number of further arrays that differ.
    safe : int
        The last step after which all arrays were compared and equal; -1 if none.
    """
    d = difference
    everywhere = len(d.ranks) == comm.size
    given = f"another one on {name_ranks(d.others)}" if d.others else "different ones"
    others = f", and {more} further arrays differ" if more else ""
    where = "all ranks" if everywhere else name_ranks(d.ranks)
    again = (
        f"continue from a checkpoint of step {safe} or an earlier one"
        if safe > 0
        else "start again"
    )
    return AgreedError(
        f"CheckEqual: expected the same {d.name} on {where}, got {given} {_since(d)}: "
        f"{_distance(comm, d, watched)}{others}; look for code that changes it on some ranks only, "
        f"and for faulty memory, and {again}",
        d.others,
    )


def _since(difference: Difference) -> str:
    before, first = difference.before, difference.first
    if before < 0:
        return "when training starts"
    if first <= before + 1:
        return f"since step {first}"
    return f"since one of the steps {before + 1} to {first}"


def _distance(comm: Communicator, difference: Difference, watched: Sequence[Watched]) -> str:
    """Compare the values with those of a rank that has the usual ones. Collective."""
    root = next(rank for rank in difference.ranks if rank not in difference.others)
    own = next((to_host(w.array) for w in watched if w.name == difference.name), None)
    size, dtype = comm.gather_object(None if own is None else (own.size, own.dtype))[root]
    usual = np.empty(size, dtype)
    if comm.rank == root:
        assert own is not None
        usual[:] = own.reshape(-1)
    comm.broadcast(usual, root)
    found = None
    if comm.rank in difference.ranks:
        assert own is not None
        found = _largest(own.reshape(-1), usual)
    number, by, value, expected, rank = max(
        (*result, rank) for rank, result in enumerate(comm.gather_object(found)) if result
    )
    verb = "differs" if number == 1 else "differ"
    return (
        f"{number} of {size} elements {verb}, by at most {by:.3g} ({expected:.9g} on rank {root}, "
        f"{value:.9g} on rank {rank})"
    )


def _largest(own: np.ndarray, usual: np.ndarray) -> tuple[int, float, float, float] | None:
    """Return the number of different elements, the largest difference, and the two values."""
    width = own.dtype.itemsize
    bits = f"u{width}"
    places = np.flatnonzero(own.view(bits) != usual.view(bits))
    if not len(places):
        return None
    with np.errstate(all="ignore"):
        mine, theirs = own[places].astype("float64"), usual[places].astype("float64")
        by = np.abs(mine - theirs)
        by[np.isnan(by)] = np.inf
    at = int(by.argmax())
    return len(places), float(by[at]), float(mine[at]), float(theirs[at])
