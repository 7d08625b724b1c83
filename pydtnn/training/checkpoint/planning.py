"""What a checkpoint contains, agreed by all ranks: arrays, other values, and who writes which file.

A state that is equal on all ranks is stored once, and otherwise once for each position along the
axis "data" of the mesh. States with arrays that cannot be combined are stored for every rank.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.model.pieces import Piece, Region
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.assembly import FilePlan, create_plan
from pydtnn.training.checkpoint.content import FORMAT, prefix_of, to_json
from pydtnn.training.checkpoint.layout import Described, arrange
from pydtnn.training.checkpoint.pieces import LocalState
from pydtnn.training.equality import hash_all
from pydtnn.utils.version import __version__

Regions = Sequence[tuple[Region, tuple[int, ...]]]
"""See `LocalState.regions`."""


class About(NamedTuple):
    """What all ranks know of the state of an object on one of them.

    Attributes
    ----------
    values : bytes
        Checksum of its values.
    arrays : bytes
        Checksum of its arrays; empty if all ranks have the same ones by construction.
    partial : bool
        See `LocalState`.
    """

    values: bytes
    arrays: bytes
    partial: bool


class StateStorage(NamedTuple):
    """How the states of one object are stored.

    Attributes
    ----------
    ranks : tuple of int
        The ranks whose values are stored, one for each state.
    of_rank : tuple of int
        For each rank, the number of its state.
    is_local : bool
        Whether every rank has a state of its own because arrays cannot be combined.
    """

    ranks: tuple[int, ...]
    of_rank: tuple[int, ...]
    is_local: bool


class Planner:
    """Plans the checkpoints of one run; the files are planned again only if regions change."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._plan: tuple[FilePlan, dict[str, StateStorage], dict[str, list[list[str]]]] | None = (
            None
        )

    def plan(
        self, trainer: Training, own: Mapping[str, LocalState], writes: bool
    ) -> tuple[FilePlan, dict[str, Any], dict[Region, Piece]]:
        """Agree on a checkpoint. Collective: all ranks call it.

        Parameters
        ----------
        trainer : Trainer
        own : mapping of str to OwnState
            The state of each object on this rank.
        writes : bool
            Whether this rank can write in the folder.

        Returns
        -------
        plan : Plan
        about : dict
            Content of `state.json`.
        pieces : dict of Region to Piece
            This rank's pieces, with the names of the arrays in the checkpoint.
        """
        comm, mesh = trainer.comm, trainer.setup.mesh
        described = {name: _describe(trainer, name, state) for name, state in own.items()}
        regions = {name: state.regions for name, state in own.items()}
        digest = hashlib.sha256(pickle.dumps(regions)).digest()
        place = {} if mesh is None else dict(mesh.position)
        told = comm.gather_object((described, digest, place, writes))
        abouts, digests, places, able = ([one[i] for one in told] for i in range(4))
        names = [*dict.fromkeys(name for about in abouts for name in about)]
        storages = {name: _store(name, abouts, places) for name in names}
        known = digests, able, storages
        if self._plan is None or known != self._known:
            everywhere = comm.gather_object(regions)
            self._known, self._plan = known, _create(storages, everywhere, able)
        plan, storages, arrays = self._plan
        values = _values(comm, own, storages)
        about: dict[str, Any] = {"format": FORMAT, "pydtnn": __version__}
        if any(storage.is_local for storage in storages.values()) and mesh is not None:
            about["mesh"] = mesh.shape
            about["local"] = [name for name in names if storages[name].is_local]
        if plan.layout.split:
            about["split"] = plan.layout.split
        about["parts"] = {
            name: [
                {"values": its_values, "arrays": its_arrays}
                for its_values, its_arrays in zip(values[name], arrays[name], strict=True)
            ]
            for name in names
        }
        pieces: dict[Region, Piece] = {}
        for name, state in own.items():
            pieces |= _rename_all(name, storages[name], comm.rank, state)
        return plan, about, pieces


def _describe(trainer: Training, name: str, state: LocalState) -> About:
    values = hashlib.sha256(to_json(state.values)).digest()
    equal = name == "model" or (name == "optimizer" and trainer.exchange.equal)
    if equal and not state.partial:
        return About(values, b"", False)
    arrays = hashlib.sha256()
    for piece in state.pieces:
        arrays.update(repr(piece.region).encode())
    on_host = [np.ascontiguousarray(piece.host(())) for piece in state.pieces]
    arrays.update(hash_all([array.reshape(-1).view(np.uint8) for array in on_host]).tobytes())
    return About(values, arrays.digest(), state.partial)


def _store(name: str, abouts: Sequence[Mapping[str, About]], places: Sequence[Any]) -> StateStorage:
    """Decide how the states of an object are stored, from what all ranks know."""
    everyone = tuple(range(len(abouts)))
    if any(about[name].partial for about in abouts if name in about):
        return StateStorage(everyone, everyone, True)
    nothing = About(b"", b"", False)
    others = [
        {axis: number for axis, number in place.items() if axis != "data"} for place in places
    ]
    first = [rank for rank in everyone if not any(others[rank].values())]
    first.sort(key=lambda rank: (places[rank].get("data", rank), rank))
    data = [places[rank].get("data", rank) for rank in everyone]
    values = {about.get(name, nothing).values for about in (abouts[rank] for rank in first)}
    alike: dict[str, set[bytes]] = {}
    for rank, about in enumerate(abouts):
        key = repr(sorted(others[rank].items()))
        alike.setdefault(key, set()).add(about.get(name, nothing).arrays)
    if len(values) == 1 and all(len(found) == 1 for found in alike.values()):
        return StateStorage((first[0],), (0,) * len(abouts), False)
    number = {data[rank]: i for i, rank in enumerate(first)}
    return StateStorage(tuple(first), tuple(number[data[rank]] for rank in everyone), False)


def _create(
    storages: dict[str, StateStorage],
    everywhere: Sequence[Mapping[str, Regions]],
    able: Sequence[bool],
) -> tuple[FilePlan, dict[str, StateStorage], dict[str, list[list[str]]]]:
    """Plan the files of a checkpoint from the regions of all ranks."""
    everyone = tuple(range(len(everywhere)))
    chosen: dict[str, StateStorage] = {}
    holders: dict[Region, list[int]] = {}
    arrays: dict[str, list[list[str]]] = {}
    for name, given in storages.items():
        own = _holders(name, given, everywhere)
        if not _is_complete(own):  # on some ranks only, such as a factor of some gradients
            given = StateStorage(everyone, everyone, True)
            own = _holders(name, given, everywhere)
        chosen[name] = given
        holders |= own
        stored: list[set[str]] = [set() for _ in given.ranks]
        for number, regions in zip(given.of_rank, everywhere, strict=True):
            stored[number] |= {region.name for region, _ in regions.get(name, ())}
        arrays[name] = [sorted(names) for names in stored]
    described = {region.name: Described(region.dtype, region.shape) for region in holders}
    for region in holders:
        if described[region.name] != (region.dtype, region.shape):
            raise ValueError(f"checkpoint: {region.name} has another type or shape on some ranks")
    writers = [rank for rank in everyone if able[rank]] or [0]
    layout = arrange(described)
    return create_plan(layout, holders, writers, len(everyone)), chosen, arrays


def _holders(
    name: str, storage: StateStorage, everywhere: Sequence[Mapping[str, Regions]]
) -> dict[Region, list[int]]:
    """Return the ranks that have each region of an object, by its name in the checkpoint."""
    holders: dict[Region, list[int]] = {}
    for rank, regions in enumerate(everywhere):
        for region, shape in regions.get(name, ()):
            holders.setdefault(_rename(name, storage, rank, region, shape), []).append(rank)
    return holders


def _is_complete(regions: Iterable[Region]) -> bool:
    """Return whether regions, of which none overlap, contain all elements of their arrays."""
    missing: dict[str, int] = {}
    for region in regions:
        missing.setdefault(region.name, prod(region.shape))
        missing[region.name] -= prod(region.lengths)
    return not any(missing.values())


def _rename(
    name: str, storage: StateStorage, rank: int, region: Region, shape: tuple[int, ...]
) -> Region:
    """Return a region with the name of its array in the checkpoint."""
    named = prefix_of(name, storage.of_rank[rank], len(storage.ranks)) + region.name
    if storage.is_local:  # the array of this rank
        size = prod(shape)
        return Region(named, region.dtype, shape, (size,), (0,), (size,))
    return region._replace(name=named)


def _rename_all(
    name: str, storage: StateStorage, rank: int, state: LocalState
) -> dict[Region, Piece]:
    """Return the pieces of an object by their regions in the checkpoint."""
    pieces = {}
    for piece, (_, shape) in zip(state.pieces, state.regions, strict=True):
        region = _rename(name, storage, rank, piece.region, shape)
        values = piece.values.reshape(-1) if storage.is_local else piece.values
        pieces[region] = Piece(region, values)
    return pieces


def _values(
    comm: Communicator, own: Mapping[str, LocalState], storages: Mapping[str, StateStorage]
) -> dict[str, list[dict[str, Any]]]:
    """Return the values of all states that are stored; on rank 0, those of other ranks too."""
    several = [name for name, storage in storages.items() if len(storage.ranks) > 1]
    mine = {name: own[name].values for name in several if name in own}
    everywhere = comm.gather_object(mine) if several else [mine]
    result = {}
    for name, storage in storages.items():
        if len(storage.ranks) > 1:
            result[name] = [everywhere[rank].get(name, {}) for rank in storage.ranks]
        else:
            result[name] = [own[name].values if name in own else {}]
    return result
