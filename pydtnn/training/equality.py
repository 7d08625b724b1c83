"""The check that ranks which must be equal are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pydtnn.comm.checks import on_host, to_host
from pydtnn.comm.communicator import Communicator
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.parameters import ParameterPart
from pydtnn.layers.statistics import RUNNING
from pydtnn.parallel.exchange import GathersParameters
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.training.setup import Setup
from pydtnn.utils.collective import name_ranks
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_int


def hash_all(arrays: Sequence[Array]) -> np.ndarray:
    """Return the hashes (uint64) of contiguous arrays; those of a device are copied to the host."""
    from pydtnn.kernels.cpu._hash import hash_arrays

    hashes = np.empty(len(arrays), np.uint64)
    hash_arrays([array if on_host(array) else to_host(array) for array in arrays], hashes)
    return hashes


Axes = tuple[str, ...]


class ComparedArray(NamedTuple):
    """An array that ranks must have in common.

    Attributes
    ----------
    name : str
        Kind and name: "parameter conv0.w", "velocity of conv0.w", "running_mean of norm0".
    array : Array
        This rank's values, contiguous.
    cut : tuple of str
        Axes of the mesh along which ranks have other values; ranks that differ only in their
        position along the others have the same.
    """

    name: str
    array: Array
    cut: Axes


def watched_arrays(setup: Setup, numbers: np.ndarray) -> list[ComparedArray]:
    """Return the arrays that this rank must have in common with others, in the network's order.

    Collective: all ranks call it. The state of an optimizer of which ranks store different ranges
    is not among them.

    Parameters
    ----------
    setup : Setup
    numbers : ndarray
        Number of updates and learning rate, filled by the caller.
    """
    stages = () if setup.mesh is None or PIPELINE not in setup.mesh.shape else (PIPELINE,)
    parts = {name: p.part for name, p in setup.model.parameters.items()}

    def cut(part: ParameterPart | None, *others: str) -> Axes:
        return (*stages, *(() if part is None else part.axes), *others)

    result = [ComparedArray("number of updates or learning rate", numbers, ())]
    gathers = isinstance(setup.exchange, GathersParameters)
    parameters = [] if gathers else [*setup.model.parameters.values()]
    for p in reversed(parameters):  # forward's order
        result.append(ComparedArray(f"parameter {p.name}", p.master, cut(p.part)))
    for slot, name, array in _slots(setup):
        result.append(ComparedArray(f"{slot} of {name}", array, cut(parts[name])))
    for s in setup.model.statistics.statistics:
        own = () if setup.equal_statistics or s.frozen else ("data",)
        for what, array in zip(RUNNING, (s.mean, s.variance), strict=True):
            result.append(ComparedArray(f"{what} of {s.name}", array, cut(s.part, *own)))
    return result


def _slots(setup: Setup) -> list[tuple[str, str, Array]]:
    """Return slot, parameter and values of the optimizer's state; nothing if it is distributed."""
    if not all(setup.comm.gather_object(setup.optimizer.is_whole)):
        return []
    entries = [(slot, entry.name, values) for slot, entry, _, values in setup.optimizer.stored()]
    order = {name: -place for place, name in enumerate(setup.model.parameters)}
    return sorted(entries, key=lambda found: order[found[1]])


def places_of(setup: Setup) -> list[dict[str, int]]:
    """Return the positions of all ranks along the axes of the mesh. Collective."""
    own = {"data": setup.comm.rank} if setup.mesh is None else setup.mesh.position
    return setup.comm.gather_object(own)


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


class Difference(NamedTuple):
    """An array that is not the same on all ranks that should have it in common.

    Attributes
    ----------
    name : str
    ranks : list of int
        Those that must have the same values.
    others : list of int
        The ranks that differ from most; empty if there is no majority.
    """

    name: str
    ranks: list[int]
    others: list[int]


def find_differences(
    comm: Communicator, places: Places, watched: Sequence[ComparedArray], hashes: np.ndarray
) -> list[Difference]:
    """Return what differs, in the order of the arrays. Collective: all ranks call it."""
    own = [(w.name, w.cut, int(value)) for w, value in zip(watched, hashes, strict=True)]
    everywhere = comm.gather_object(own)
    held = [{name: value for name, _, value in rank} for rank in everywhere]
    known = {name: cut for rank in everywhere for name, cut, _ in rank}
    found = []
    for name, cut in known.items():
        for members in groups(places, cut):
            values = {rank: held[rank][name] for rank in members if name in held[rank]}
            counts = Counter(values.values()).most_common(2)
            if len(counts) > 1:
                (usual, most), (_, second) = counts
                others = [rank for rank, value in values.items() if value != usual]
                found.append(Difference(name, [*values], others if most > second else []))
    return found


def error_of(size: int, difference: Difference, more: int, steps: tuple[int, int]) -> AgreedError:
    """Return the error that describes a difference.

    Parameters
    ----------
    size : int
        Number of ranks.
    difference : Difference
    more : int
        Number of further arrays that differ.
    steps : (int, int)
        The last step after which all arrays were compared and equal, -1 if none; and this one.
    """
    d, (safe, _) = difference, steps
    given = f"another one on {name_ranks(d.others)}" if d.others else "different ones"
    others = f", and {more} further arrays differ" if more else ""
    where = "all ranks" if len(d.ranks) == size else name_ranks(d.ranks)
    again = (
        f"continue from a checkpoint of step {safe} or an earlier one"
        if safe > 0
        else "start again"
    )
    return AgreedError(
        f"CheckEqual: expected the same {d.name} on {where}, got {given} {_since(*steps)}{others}; "
        f"look for code that changes it on some ranks only, and for faulty memory, and {again}",
        d.others,
    )


def _since(safe: int, step: int) -> str:
    if safe < 0:
        return "when training starts"
    if step <= safe + 1:
        return f"since step {step}"
    return f"since one of the steps {safe + 1} to {step}"


DEFAULT_PERIOD = 100
"""Default number of steps between two comparisons."""


class CheckEqual(Callback):
    """Compare parameters, optimizer and running statistics of all ranks, and stop if they differ.

    Ranks of synchronous schemes have the same bytes between steps. Where they do not, because a bit
    in the memory of one rank has changed or code has changed one rank only, training continues
    without any sign of it, and its results depend on the rank that saves them. Every `every` steps,
    when training starts and ends, and before a checkpoint is saved or a loss that is not finite is
    reported, all ranks compare a 64-bit hash of each array: parameters, the optimizer's state,
    running statistics, and the learning rate. Ranks of a mesh compare the arrays that they must
    have in common. What differs by design is not compared: running statistics of ranks that average
    them before an evaluation, and the state of an optimizer of which every rank stores another
    part.

    The error names the first array that differs, in the order learning rate, parameters, optimizer,
    running statistics, the ranks that are in the minority, and the steps since the last comparison.
    Results of training do not depend on it.

    A `Trainer` with several ranks has this callback by default: see its argument `check_equal`.

    Parameters
    ----------
    every : int
        Steps from one comparison to the next.

    Raises
    ------
    AgreedError
        On all ranks, if they differ; when training starts, also if the scheme has different
        parameters on each rank, such as local SGD.

    References
    ----------
    Y. Collet, "xxHash fast digest algorithm", version 0.1.1: XXH64.
    """

    reads_gradients = False

    def __init__(self, every: int = DEFAULT_PERIOD) -> None:
        self.every = check_int(type(self).__name__, "every", every, at_least=1)
        self._numbers = np.zeros(2)
        self._watched: list[ComparedArray] = []
        self._places: list[dict[str, int]] = []
        self._kinds: list[tuple[str, ...]] = []  # the axes along which some array is cut
        self._members: list[np.ndarray] = []  # this rank's arrays of each of them
        self._safe = -1

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Find the arrays to compare, and compare them. Collective: all ranks call it."""
        who = type(self).__name__
        if why := why_not("equal ranks", trainer.setup):
            raise AgreedError(f"{who} {why}")
        self.close()
        if trainer.comm.size == 1:
            return
        self._watched = watched_arrays(trainer.setup, self._numbers)
        self._places = places_of(trainer.setup)
        cuts = [w.cut for w in self._watched]
        self._kinds = sorted({cut for own in trainer.comm.gather_object(cuts) for cut in own})
        self._members = [
            np.array([i for i, cut in enumerate(cuts) if cut == kind], int) for kind in self._kinds
        ]
        self.compare(trainer)

    def on_step_end(self, trainer: Training) -> None:
        """Compare the ranks if it is time. Collective: all ranks call it."""
        if trainer.optimizer.iterations % self.every == 0:
            self.compare(trainer)

    def on_fit_end(self, trainer: Training) -> None:
        """Compare the results of training. Collective: all ranks call it."""
        if self._safe != trainer.optimizer.iterations:
            self.compare(trainer)

    def close(self) -> None:
        """Release the arrays."""
        self._watched, self._members = [], []
        self._safe = -1

    def compare(self, trainer: Training) -> None:
        """Compare the ranks now. Collective: all ranks call it, while `fit` runs.

        Raises
        ------
        AgreedError
            On all ranks, if they differ.
        """
        if not self._watched:
            return
        comm, step = trainer.comm, trainer.optimizer.iterations
        self._numbers[:] = step, trainer.optimizer.lr_now
        hashes = hash_all([w.array for w in self._watched])
        own = hash_all([hashes[members] for members in self._members])
        everywhere = np.empty(comm.size * len(own), np.uint64)
        comm.allgather(own, [len(own)] * comm.size, everywhere)
        table = everywhere.reshape(comm.size, len(own))
        if any(
            len({*table[ranks, column].tolist()}) > 1
            for column, kind in enumerate(self._kinds)
            for ranks in groups(self._places, kind)
        ):
            found = find_differences(comm, self._places, self._watched, hashes)
            raise error_of(comm.size, found[0], len(found) - 1, (self._safe, step))
        self._safe = step


def create_check(every: int | None, setup: Setup) -> list[Callback]:
    """Return the callback of a trainer that compares its ranks, or nothing.

    Parameters
    ----------
    every : int or None
        Steps between comparisons, 0: none. By default `DEFAULT_PERIOD`, where ranks must be equal.
    setup : Setup

    Raises
    ------
    TypeError, ValueError
        If `every` is not a number of steps, or ranks differ by design.
    """
    if every is not None:
        check_int("Trainer", "check_equal", every, at_least=0)
    if every and (why := why_not("equal ranks", setup)):
        raise ValueError(f"Trainer: check_equal {why}")
    if every == 0 or setup.comm.size == 1 or not setup.exchange.equal:
        return []
    return [CheckEqual(DEFAULT_PERIOD if every is None else every)]
