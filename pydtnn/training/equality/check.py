"""The check that ranks which must be equal are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from pydtnn.comm.checks import on_host, to_host
from pydtnn.comm.communicator import Communicator
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.parameters import Part
from pydtnn.layers.statistics import RUNNING
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.training.setup import Setup
from pydtnn.utils import clock
from pydtnn.utils.collective import name_ranks
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_int

MAX_TIME_SHARE = 0.004
"""Part of the time of training that hashes after each step may take."""

TIMED_STEPS = 6
"""Steps whose times are measured before the number of arrays hashed per step is chosen."""

MAX_HASHES = 256
"""Hashes of each array that are kept between two comparisons."""


def hash_all(arrays: Sequence[Array]) -> np.ndarray:
    """Return the hashes (uint64) of contiguous arrays; those of a device are copied to the host."""
    from pydtnn.kernels.cpu._hash import hash_arrays

    hashes = np.empty(len(arrays), np.uint64)
    hash_arrays([array if on_host(array) else to_host(array) for array in arrays], hashes)
    return hashes


class Hashes:
    """Hashes of arrays after each step since the last comparison.

    After each step every array is hashed, or if that takes more than `MAX_TIME_SHARE` of the time
    of a step, every `spread`-th array in turn. Arrays of a device are hashed for comparisons only.

    Parameters
    ----------
    arrays : sequence of Array
    every : int
        Steps between comparisons.

    Attributes
    ----------
    spread : int
        Steps in which every array is hashed once; 0: none between comparisons.
    """

    def __init__(self, arrays: Sequence[Array], every: int) -> None:
        self._arrays = [*arrays]
        self._every = every
        self._records: list[tuple[int, int, int, np.ndarray]] = []
        self.spread = 0
        self.set_spread(1 if all(map(on_host, arrays)) else 0)

    def set_spread(self, spread: int) -> None:
        """Hash every array once in this number of steps."""
        spread = max(spread, ceil(self._every / MAX_HASHES)) if spread else 0
        self.spread = 0 if spread >= self._every else spread
        self._turns = [self._arrays[turn :: self.spread] for turn in range(self.spread)]

    def after(self, step: int) -> None:
        """Hash the arrays whose turn it is."""
        if self.spread:
            turn = step % self.spread
            self._records.append((step, turn, self.spread, hash_all(self._turns[turn])))

    def complete(self, step: int) -> np.ndarray:
        """Hash all arrays, and return the hashes."""
        hashes = hash_all(self._arrays)
        self._records.append((step, 0, 1, hashes))
        return hashes

    def forget(self) -> None:
        """Keep the last hashes only, which were equal to those of the other ranks."""
        del self._records[:-1]

    def of(self, index: int) -> dict[int, int]:
        """Return the hashes of an array by step, in the order of the steps."""
        return {
            step: int(hashes[index // spread])
            for step, turn, spread, hashes in self._records
            if index % spread == turn
        }


class Pace:
    """The choice of `Hashes.spread` from the times of the first steps."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._hashes: list[float] = []
        self._last: float | None = None
        self.chosen = False

    def measure(self, hashes: Hashes, step: int) -> bool:
        """Hash after a step; return whether enough steps have been measured for `spread`."""
        begin = clock.now()
        hashes.after(step)
        end = clock.now()
        if self._last is not None:
            self._steps.append(begin - self._last)
            self._hashes.append((end - begin) * hashes.spread)
        self._last = end
        return len(self._steps) >= TIMED_STEPS

    def pause(self) -> None:
        """Do not count the time until the next step."""
        self._last = None

    def spread(self) -> int:
        """Return in how many steps arrays can be hashed within `MAX_TIME_SHARE` of their time."""
        least = MAX_TIME_SHARE * np.median(self._steps)
        return max(1, ceil(np.median(self._hashes) / least)) if least else 1


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

    def cut(part: Part | None, *others: str) -> Axes:
        return (*stages, *(() if part is None else part.axes), *others)

    result = [ComparedArray("number of updates or learning rate", numbers, ())]
    parameters = [] if setup.exchange.gathers else [*setup.model.parameters.values()]
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
    stored = [*setup.optimizer.stored()]
    complete = all(own == slice(0, len(bucket.values)) for _, bucket, own, _ in stored)
    if not all(setup.comm.gather_object(complete)):
        return []

    def entries() -> Iterator[tuple[str, str, Array]]:
        for slot, bucket, _, values in stored:
            for entry in bucket.parameters:
                yield slot, entry.name, values[entry.slice]

    order = {name: -place for place, name in enumerate(setup.model.parameters)}
    return sorted(entries(), key=lambda found: order[found[1]])


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
    comm: Communicator, places: Places, watched: Sequence[ComparedArray], hashes: Hashes
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
    sequences = comm.gather_object({name: by for name, (_, by) in own.items() if name in names})
    differences = [
        _difference(order, name, {rank: sequences[rank][name] for rank in members})
        for order, name, members in found
    ]
    return sorted(differences, key=lambda d: (d.first, d.order))


def _difference(order: int, name: str, sequences: Mapping[int, Mapping[int, int]]) -> Difference:
    before, (some, *rest) = -1, sequences.values()
    for first in [step for step in some if all(step in sequence for sequence in rest)]:
        counts = Counter(sequence[first] for sequence in sequences.values())
        if len(counts) > 1:
            break
        before = first
    (usual, most), (_, second) = counts.most_common(2)
    others = [rank for rank, sequence in sequences.items() if sequence[first] != usual]
    return Difference(order, name, [*sequences], before, first, others if most > second else [])


def error_of(
    comm: Communicator,
    difference: Difference,
    watched: Sequence[ComparedArray],
    more: int,
    safe: int,
) -> AgreedError:
    """Return the error that describes a difference. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    difference : Difference
    watched : sequence of ComparedArray
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


def _distance(comm: Communicator, difference: Difference, watched: Sequence[ComparedArray]) -> str:
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

    The error names the array that was different first, the ranks that are in the minority, the
    number of elements that differ and the largest difference, and the step. For the step, arrays
    are hashed after each step too, without messages. If this would take more than 0.4 % of the
    time of a step, an array is hashed only once every few steps, and the error names the steps from
    one hash to the next. Arrays on a GPU are hashed only for comparisons. Results of training do
    not depend on it.

    A `Trainer` with several ranks has this callback by default: see its argument `check_equal`.

    Parameters
    ----------
    every : int
        Steps from one comparison to the next.

    Attributes
    ----------
    spread : int
        Steps within which each array is hashed once; 0 if only comparisons hash.

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
        self.spread = 0
        self._numbers = np.zeros(2)
        self._watched: list[ComparedArray] = []
        self._places: list[dict[str, int]] = []
        self._kinds: list[tuple[str, ...]] = []  # the axes along which some array is cut
        self._members: list[np.ndarray] = []  # this rank's arrays of each of them
        self._hashes: Hashes | None = None
        self._pace: Pace | None = None
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
        self._hashes = Hashes([w.array for w in self._watched], self.every)
        self._pace = Pace() if self._hashes.spread else None
        if self.spread > 1:  # of an earlier `fit`
            self._hashes.set_spread(self.spread)
        self.spread = self._hashes.spread
        self.compare(trainer)

    def on_epoch_start(self, trainer: Training) -> None:
        """Do not count an evaluation as part of a step."""
        if self._pace is not None:
            self._pace.pause()

    def on_step_end(self, trainer: Training) -> None:
        """Hash arrays, and compare them if it is time. Collective: all ranks call it."""
        if self._hashes is None:
            return
        step = trainer.optimizer.iterations
        self._read_numbers(trainer)
        if step % self.every == 0:
            self.compare(trainer)
            if self._pace is not None:
                self._pace.pause()
        elif self._pace is None:
            self._hashes.after(step)
        elif self._pace.measure(self._hashes, step):
            self._hashes.set_spread(trainer.comm.gather_object(self._pace.spread())[0])
            self.spread, self._pace = self._hashes.spread, None

    def on_fit_end(self, trainer: Training) -> None:
        """Compare the results of training. Collective: all ranks call it."""
        if self._hashes is not None and self._safe != trainer.optimizer.iterations:
            self.compare(trainer)

    def close(self) -> None:
        """Release the arrays."""
        self._watched, self._members = [], []
        self._hashes, self._safe = None, -1

    def _read_numbers(self, trainer: Training) -> None:
        self._numbers[:] = trainer.optimizer.iterations, trainer.optimizer.lr_now

    def compare(self, trainer: Training) -> None:
        """Compare the ranks now. Collective: all ranks call it, while `fit` runs.

        Raises
        ------
        AgreedError
            On all ranks, if they differ.
        """
        if self._hashes is None:
            return
        comm, step = trainer.comm, trainer.optimizer.iterations
        self._read_numbers(trainer)
        hashes = self._hashes.complete(step)
        own = hash_all([hashes[members] for members in self._members])
        everywhere = np.empty(comm.size * len(own), np.uint64)
        comm.allgather(own, [len(own)] * comm.size, everywhere)
        table = everywhere.reshape(comm.size, len(own))
        if any(
            len({*table[ranks, column].tolist()}) > 1
            for column, kind in enumerate(self._kinds)
            for ranks in groups(self._places, kind)
        ):
            found = find_differences(comm, self._places, self._watched, self._hashes)
            raise error_of(comm, found[0], self._watched, len(found) - 1, self._safe)
        self._hashes.forget()
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


def with_check(own: Sequence[Callback], callbacks: Sequence[Callback]) -> list[Callback]:
    """Return callbacks before a trainer's own check, unless they include one."""
    checked = any(isinstance(callback, CheckEqual) for callback in callbacks)
    return [*callbacks, *(() if checked else own)]


def compare_ranks(trainer: Training, callbacks: Sequence[Callback]) -> None:
    """Compare the ranks now, if one of the callbacks does. Collective: all ranks call it.

    Raises
    ------
    AgreedError
        On all ranks, if they differ.
    """
    for callback in callbacks:
        if isinstance(callback, CheckEqual):
            callback.compare(trainer)
