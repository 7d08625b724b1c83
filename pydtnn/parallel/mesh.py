"""The ranks of a job as a grid with named axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Self

import numpy as np

from pydtnn.comm.communicator import Communicator, Message
from pydtnn.comm.serial import Serial
from pydtnn.comm.traffic import Traffic
from pydtnn.layers.collectives import PIPELINE, AllGather, Collective, Pending, Sum
from pydtnn.layers.parameters import Cut, ParameterPart
from pydtnn.optimizers.whole import OwnedParameter
from pydtnn.utils.names import SuggestsNames, unknown
from pydtnn.utils.validate import check_int

FIRST_TAG, TAGS = 1 << 10, 1 << 14
"""Tags of the messages of layers: as many can be pending along an axis."""

SHARD = "shard"
"""Axis with other samples, too, over which a scheme divides what `Partition` names."""

NOT_NAMES = ("batch", "comm", "self")
"""Names that an axis cannot have: one of the library, and arguments of `Mesh`."""


class Mesh(SuggestsNames):
    """The ranks of a communicator as a grid with named axes. Collective: all ranks construct it.

    Ranks that differ only in their position along an axis form a group. Samples are distributed
    along the axis "data"; a network is cut along the others as a plan states (`pydtnn.Plan`).

    Parameters
    ----------
    comm : Communicator
    **axes : int
        Ranks along each axis; their product is the number of ranks. "data" is 1 by default. Ranks
        of one host are next to each other along the last axis, so the axis with the most messages
        should be the last. Ranks along "shard" are ranks of "data": ``data=2, shard=4`` has 8 of
        these, of which a scheme with `copies` divides the state over 4 neighbours.

    Attributes
    ----------
    comm : Communicator
        All ranks.
    shape : dict of str to int
        Ranks along each axis.
    position : dict of str to int
        This rank's position along each axis.
    copies : int or None
        Ranks along "data" that were given beside "shard"; None without "shard".
    traffic : dict of str to Traffic
        Messages of each layer so far, by the layer's name.

    Raises
    ------
    ValueError
        If the axes do not multiply to the number of ranks.

    Examples
    --------
    >>> mesh = Mesh(Serial(), data=1)
    >>> mesh.shape, mesh.position
    ({'data': 1}, {'data': 0})
    """

    def __init__(self, comm: Communicator, **axes: int) -> None:
        given = {name: check_int("Mesh", name, n, at_least=1) for name, n in axes.items()}
        self.shape, self.copies = without_shard(given)
        if prod(self.shape.values()) != comm.size:
            told = " x ".join(f"{name}={ranks}" for name, ranks in axes.items()) or "no axes"
            raise ValueError(
                f"Mesh: axes must multiply to the number of ranks, {comm.size}, got {told} = "
                f"{prod(self.shape.values())}"
            )
        self.comm = comm
        self._order = sorted(range(comm.size), key=lambda rank: (comm.hosts[rank], rank))
        self._place = self._order.index(comm.rank)
        self._in_order = self._order == [*range(comm.size)]
        self.position: dict[str, int] = {}
        rest = self._place
        for name in reversed(self.shape):
            rest, self.position[name] = divmod(rest, self.shape[name])
        self.traffic: dict[str, Traffic] = {}
        self._tags: dict[str, int] = {}
        self._groups = {name: self._group(name) for name in self.shape}

    def _group(self, name: str) -> Communicator:
        """Return the group of this rank along an axis."""
        if self.shape[name] == 1:
            return Serial()
        if self.shape[name] == self.comm.size and self._in_order:
            return self.comm
        stride = prod(n for axis, n in self._after(name).items())
        color = self._place - self.position[name] * stride
        return self.comm.split(color, self.position[name])

    def _after(self, name: str) -> Mapping[str, int]:
        names = list(self.shape)
        return {axis: self.shape[axis] for axis in names[names.index(name) + 1 :]}

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={n}' for name, n in self.shape.items())})"

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes other than "data", along which a network is cut."""
        return tuple(name for name in self.shape if name != "data")

    @property
    def data(self) -> Communicator:
        """The group of this rank along the axis "data"."""
        return self.group("data")

    def group(self, axis: str) -> Communicator:
        """Return the group of this rank along an axis.

        Raises
        ------
        ValueError
            If there is no such axis.
        """
        if axis not in self._groups:
            raise ValueError(unknown("axis of the mesh", axis, self._groups))
        return self._groups[axis]

    def subgroup(self, axis: str, positions: Sequence[int]) -> Communicator:
        """Return the group of this rank and others at some positions along an axis.

        Collective at the first call with these positions: all ranks along the axis call it, each
        with its own position among others.
        """
        key = f"{axis} {positions}"
        if key not in self._groups:
            self._groups[key] = self.group(axis).split(positions[0], self.position[axis])
        return self._groups[key]

    def communicate(self, asked: Sequence[tuple[Any, Collective]]) -> list[Pending]:
        """Start collectives that layers ask for; `pydtnn.model.execution.Communicate`."""
        return [self.start(node.name, collective) for node, collective in asked]

    def start(self, layer: str, collective: Collective) -> Pending:
        """Start a collective and count its messages for a layer."""
        with self.counted(layer):
            *others, axis = collective.axes
            for other in others:  # sums over several axes are sums of sums
                assert isinstance(collective, Sum)
                collective = Sum(self._start(other, collective).wait(), collective.axes)
            return self._start(axis, collective)

    def counted(self, layer: str) -> AbstractContextManager[None]:
        """Count the messages of the ``with`` block for a layer, too."""
        return self.comm.traffic.counted(self.traffic.setdefault(layer, Traffic()))

    def _start(self, axis: str, collective: Collective) -> Pending:
        number = self._tags[axis] = self._tags.get(axis, -1) + 1
        return collective.start(self.group(axis), FIRST_TAG + number % TAGS)

    def gather(self, own: np.ndarray, part: ParameterPart) -> np.ndarray:
        """Return the whole of an array of which each rank has a part. Collective."""

        def along(array: np.ndarray, cut: Cut) -> np.ndarray:
            parts = AllGather(array, cut.axis, dim=cut.dim, bounds=cut.bounds)
            whole: np.ndarray = self._start(cut.axis, parts).wait()
            return whole

        return part.gather(own, self.position, along)

    def _holders(self, p: OwnedParameter) -> Iterator[tuple[int, Mapping[str, int]]]:
        """Yield the ranks that have parts of a parameter, with their positions."""
        for place in np.ndindex(*(self.shape[axis] for axis in p.part.axes)):
            position = {**self.position, **dict(zip(p.part.axes, place, strict=True))}
            yield self.rank_at(position), position

    def rank_at(self, position: Mapping[str, int]) -> int:
        """Return the rank at a position; axes that are not given are those of this rank."""
        place = [{**self.position, **position}[axis] for axis in self.shape]
        return self._order[int(np.ravel_multi_index(place, tuple(self.shape.values())))]

    def gather_whole(self, parameters: Sequence[OwnedParameter]) -> None:
        """Copy the parts of parameters to the owners of the whole ones. Collective."""
        sends, receives = list[Message](), list[Message]()
        placed: list[tuple[np.ndarray, np.ndarray]] = []
        for p in parameters:
            sends += [] if p.whole else [(array, self.rank_at(p.owner)) for array in p.own]
            for rank, position in self._holders(p) if p.whole else ():
                for own, whole in zip(p.own, p.whole, strict=True):
                    there = whole.reshape(p.part.grid)[p.part.index(position)]
                    part = own
                    if rank != self.comm.rank:
                        part = np.empty_like(own, shape=there.size)
                        receives.append((part, rank))
                    placed.append((there, part))
        self.comm.exchange(sends, receives, FIRST_TAG + TAGS).wait()
        for there, part in placed:
            there[...] = part.reshape(there.shape)

    def scatter_whole(self, parameters: Sequence[OwnedParameter]) -> None:
        """Copy the values of whole parameters from their owners to the parts. Collective."""
        sends, receives = list[Message](), list[Message]()
        for p in parameters:
            receives += [] if p.whole else [(p.own[0], self.rank_at(p.owner))]
            for rank, position in self._holders(p) if p.whole else ():
                part = p.part.take(p.whole[0], position).reshape(-1)
                if rank == self.comm.rank:
                    p.own[0][...] = part
                else:
                    sends.append((part, rank))
        self.comm.exchange(sends, receives, FIRST_TAG + TAGS).wait()

    def merge_states(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays by name of all ranks with the same stage. Collective."""
        for axis in (axis for axis in self.shape if axis != PIPELINE):
            for other in self.group(axis).gather_object(state):
                state = {**other, **state}
        return state

    def free(self) -> None:
        """Free the groups. Collective: all ranks call it; see `Communicator.free`."""
        for group in self._groups.values():
            if group is not self.comm:
                group.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.free()


def without_shard(axes: Mapping[str, int]) -> tuple[dict[str, int], int | None]:
    """Return axes of which "data" has the ranks along "shard", and those that it had beside them.

    >>> without_shard({"data": 2, "shard": 4, "filter": 2}), without_shard({"filter": 2})
    (({'data': 8, 'filter': 2}, 2), ({'data': 1, 'filter': 2}, None))
    """
    rest = {name: ranks for name, ranks in axes.items() if name != SHARD}
    whole = rest if "data" in rest else {"data": 1, **rest}
    if SHARD not in axes:
        return whole, None
    return {**whole, "data": axes[SHARD] * whole["data"]}, whole["data"]


def parse_axes(who: str, text: str) -> dict[str, int]:
    """Return the ranks along each axis of a mesh, of which a text is a list.

    >>> parse_axes("--parallel", "data=2,filter=4")
    {'data': 2, 'filter': 4}

    Raises
    ------
    ValueError
        The message begins with `who`.
    """
    axes: dict[str, int] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, ranks = (part.strip() for part in item.partition("="))
        if not re.fullmatch(r"[a-z_]+", name) or not re.fullmatch(r"[1-9][0-9]{,8}", ranks):
            raise ValueError(
                f"{who} must be axes with their ranks, at least 1, such as data=2,filter=4, got "
                f"{item!r}"
            )
        if name in axes or name in NOT_NAMES:
            problem = "occurs twice" if name in axes else "is not possible as a name"
            raise ValueError(f"{who}: the axis {name} {problem}; use another name")
        axes[name] = int(ranks)
    return axes


def fewer(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the axes of a mesh for fewer ranks, all of which are used.

    The network remains cut into as many parts if that divides the ranks, and otherwise into more
    parts of its last axis, so that no rank needs more memory, if there are enough ranks.

    >>> fewer({"data": 2, "filter": 2}, 3), fewer({"data": 4, "filter": 2}, 6)
    ({'data': 1, 'filter': 3}, {'data': 3, 'filter': 2})
    >>> fewer({"pipeline": 4}, 3), fewer({"filter": 2}, 1)
    ({'data': 1, 'pipeline': 3}, {'data': 1})
    """
    model = {axis: n for axis, n in axes.items() if axis != "data" and n > 1}
    parts = prod(model.values())
    if ranks % parts == 0:
        return {"data": ranks // parts, **model}
    *others, last = model
    rest = prod(model[axis] for axis in others)
    for data in range(max(ranks // parts, 1), 0, -1):
        if ranks % (data * rest) == 0 and ranks // (data * rest) > 1:
            return {"data": data, **model, last: ranks // (data * rest)}
    return {"data": 1, last: ranks} if ranks > 1 else {"data": 1}
