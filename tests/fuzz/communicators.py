"""A random program of communication that all ranks carry out, and what NumPy says it must give.

All ranks draw the same program, so that each can compute what every rank contributes. What each
draws for itself is how it goes about it: in which order it posts its messages, when and how it
completes what is under way. Values are small whole numbers, whose sums are exact in every type.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Request, create_communicator
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.rule import by_rule
from pydtnn.comm.staged import Staged
from pydtnn.comm.wrapper import Delayed
from tests.checked import Checked
from tests.comm.on_device import OnDevice
from tests.simulated.cupy import SimulatedCupy
from tests.simulated.cupy.fabric import Fabric

TYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
SIZES = (0, 1, 2, 7, 64, 1013, 20_011)
STEPS = 25
GRACE = 200.0
"""Time for the last case, in s. A rank that needs more ends, whether or not anybody watches it."""
Compare = Callable[[Any, Any], None]
Wrap = Callable[[Communicator], Communicator]


def _on_device(comm: Communicator) -> Communicator:
    xp = SimulatedCupy(Fabric(), seed=comm.rank)
    return OnDevice(Staged(comm, xp), xp)


WRAPPERS: dict[str, Wrap] = {
    "checked": Checked,
    "delayed": lambda comm: Delayed(comm, longest=1e-4),
    "staged": lambda comm: Staged(comm, SimulatedCupy(Fabric())),
    "on device": _on_device,
    "rule": by_rule,
}
for _name in SCHEDULES:
    WRAPPERS[_name] = lambda comm, name=_name: Scheduled(comm, name, chunk_bytes=300)  # type: ignore[misc]

OUTERMOST = ("on device",)
"""They take arrays of the host and hand on those of a device."""


def draw_wrappers(rng: np.random.Generator) -> list[str]:
    """Draw up to three wrappers, from the inside out."""
    names = [str(name) for name in rng.choice([*WRAPPERS], rng.integers(4), replace=False)]
    return sorted(names, key=lambda name: name in OUTERMOST)


def wrap(comm: Communicator, names: list[str]) -> Communicator:
    for name in names:
        comm = WRAPPERS[name](comm)
    return comm


@dataclass
class Flight:
    """An operation under way, and what its array must be afterwards."""

    request: Request
    array: np.ndarray
    expected: np.ndarray
    group: int


class Program:
    """One rank's part in a random program.

    Parameters
    ----------
    comm : Communicator
    rng : numpy.random.Generator
        Draws the program: the same on all ranks.
    compare : callable
        Called with what there is and what is expected.
    """

    def __init__(self, comm: Communicator, rng: np.random.Generator, compare: Compare) -> None:
        self.rng = rng
        self.own = np.random.default_rng([int(rng.integers(1 << 30)), comm.rank])
        self.compare = compare
        self.groups: dict[int, Communicator] = {0: comm}
        # Of each group of a split, the group of every rank, as ranks of `comm`.
        self.members: dict[int, list[list[int]]] = {0: [[*range(comm.size)]] * comm.size}
        self.all, self.rank = comm, comm.rank
        self.flights: list[Flight] = []
        self.turn = 0

    def run(self) -> None:
        kinds = [self.allreduce, self.iallreduce, self.iallreduce, self.broadcast, self.messages]
        kinds += [self.messages, self.reduce_scatter, self.allgather, self.gather, self.exchange]
        kinds += [self.barrier, self.split, self.free]
        for turn in range(int(self.rng.integers(3, STEPS))):
            self.turn = turn
            number = int(self.rng.choice([*self.groups]))
            kinds[self.rng.integers(len(kinds))](number)
            self.complete(float(self.own.random()) ** 2)
        self.complete(1.0)
        for number in [number for number in self.groups if number]:
            self.groups.pop(number).free()

    def values(self, rank: int, n: int, dtype: str) -> np.ndarray:
        """What a rank, one of all, contributes to this turn."""
        return ((np.arange(n) * (1 + self.turn) + 3 * rank + self.turn) % 7).astype(dtype)

    def draw(self) -> tuple[int, str]:
        return int(self.rng.choice(SIZES)), str(self.rng.choice(TYPES))

    def team(self, number: int) -> list[int]:
        return self.members[number][self.rank]

    def reduced(self, team: list[int], n: int, dtype: str, op: str) -> np.ndarray:
        arrays = np.stack([self.values(rank, n, dtype) for rank in team])
        result = {"sum": np.sum, "max": np.max, "min": np.min}[op](arrays, axis=0)
        return result.astype(dtype)

    def complete(self, share: float) -> None:
        """Complete some of what is under way, in an order of this rank's own."""
        count = round(share * len(self.flights))
        for _ in range(count):
            flight = self.flights.pop(int(self.own.integers(len(self.flights))))
            if self.own.random() < 0.5:
                while not flight.request.test():
                    time.sleep(0)
            else:
                flight.request.wait()
            if self.own.random() < 0.2:
                flight.request.wait()  # without effect
            self.compare(flight.array, flight.expected)

    def allreduce(self, number: int) -> None:
        (n, dtype), op = self.draw(), str(self.rng.choice(["sum", "sum", "max", "min"]))
        array = self.values(self.rank, n, dtype)
        self.groups[number].allreduce(array, op)
        self.compare(array, self.reduced(self.team(number), n, dtype, op))

    def iallreduce(self, number: int) -> None:
        (n, dtype), op = self.draw(), str(self.rng.choice(["sum", "sum", "max", "min"]))
        array = self.values(self.rank, n, dtype)
        request = self.groups[number].iallreduce(array, op)
        expected = self.reduced(self.team(number), n, dtype, op)
        self.flights.append(Flight(request, array, expected, number))

    def broadcast(self, number: int) -> None:
        (n, dtype), team = self.draw(), self.team(number)
        root = int(self.rng.integers(1 << 20)) % len(team)
        array = self.values(self.rank, n, dtype)
        self.groups[number].broadcast(array, root)
        self.compare(array, self.values(team[root], n, dtype))

    def counts(self, number: int, n: int) -> list[int]:
        """Cut n into a part for each rank of a group; teams of one split draw alike."""
        weights = self.rng.random(self.all.size)[: len(self.team(number))]
        ends = np.floor(np.cumsum(weights) / weights.sum() * n).astype(int).tolist()
        ends[-1] = n
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def reduce_scatter(self, number: int) -> None:
        n, dtype = self.draw()
        counts, comm = self.counts(number, n), self.groups[number]
        array, out = self.values(self.rank, n, dtype), np.zeros(counts[comm.rank], dtype)
        comm.reduce_scatter(array, counts, out)
        begin = sum(counts[: comm.rank])
        whole = self.reduced(self.team(number), n, dtype, "sum")
        self.compare(out, whole[begin : begin + len(out)])
        self.compare(array, self.values(self.rank, n, dtype))

    def allgather(self, number: int) -> None:
        n, dtype = self.draw()
        in_place = self.rng.random() < 0.5
        counts, comm = self.counts(number, n), self.groups[number]
        out, begin = np.zeros(n, dtype), sum(counts[: comm.rank])
        part = self.values(self.rank, counts[comm.rank], dtype)
        if in_place:
            out[begin : begin + len(part)] = part
            part = out[begin : begin + len(part)]
        comm.allgather(part, counts, out)
        parts = zip(self.team(number), counts, strict=True)
        self.compare(out, np.concatenate([self.values(rank, n, dtype) for rank, n in parts]))

    def gather(self, number: int) -> None:
        found = self.groups[number].gather_object((self.rank, self.turn))
        self.compare(found, [(rank, self.turn) for rank in self.team(number)])

    def barrier(self, number: int) -> None:
        self.groups[number].barrier()

    def messages(self, number: int) -> None:
        """Several messages between any two ranks, also to oneself and of equal tags."""
        comm, team = self.groups[number], self.team(number)
        sends, receives = [], []
        for _ in range(int(self.rng.integers(1, 5))):
            n, dtype = self.draw()
            ends, tag = self.rng.integers(1 << 20, size=2) % len(team), 3 * self.turn
            tag += int(self.rng.integers(3))
            if team[ends[0]] == self.rank:
                sends.append((self.values(self.rank, n, dtype), int(ends[1]), tag))
            if team[ends[1]] == self.rank:
                expected = self.values(team[ends[0]], n, dtype)
                receives.append((np.zeros(n, dtype), int(ends[0]), tag, expected))
        while sends or receives:
            if sends and (not receives or self.own.random() < 0.5):
                array, to, tag = sends.pop(0)
                request = comm.isend(array, to, tag)
                self.flights.append(Flight(request, array, array.copy(), number))
            else:
                array, source, tag, expected = receives.pop(0)
                request = comm.irecv(array, source, tag)
                self.flights.append(Flight(request, array, expected, number))

    def exchange(self, number: int) -> None:
        """Send to the next ranks and receive from those before, in one round."""
        comm, team = self.groups[number], self.team(number)
        n, dtype = self.draw()
        shifts = [s for s in range(1, 3) if s < comm.size]
        sent = self.values(self.rank, n, dtype)
        sends = [(sent, (comm.rank + s) % comm.size) for s in shifts]
        froms = [(comm.rank - s) % comm.size for s in shifts]
        arrays = [np.zeros(n, dtype) for _ in shifts]
        request = comm.exchange(sends, [*zip(arrays, froms, strict=True)], 3 * self.turn + 100)
        request.wait()
        for array, source in zip(arrays, froms, strict=True):
            self.compare(array, self.values(team[source], n, dtype))

    def split(self, number: int) -> None:
        colors = self.rng.integers(0, 3, self.all.size)
        keys = self.rng.integers(0, 3, self.all.size)
        child = self.groups[number].split(int(colors[self.rank]), int(keys[self.rank]))
        new = max(self.members) + 1
        self.members[new] = [
            [rank for _, _, rank in sorted(
                (keys[rank], place, rank)
                for place, rank in enumerate(team)
                if colors[rank] == colors[mine]
            )]
            for mine, team in enumerate(self.members[number])
        ]  # fmt: skip
        self.compare(
            [child.size, child.rank], [len(self.team(new)), self.team(new).index(self.rank)]
        )
        if self.rng.random() < 0.8:  # else it is dropped at once
            self.groups[new] = child

    def free(self, number: int) -> None:
        """Complete what is under way on a group, and free it."""
        if not number:
            return
        for flight in [flight for flight in self.flights if flight.group == number]:
            flight.request.wait()
            self.compare(flight.array, flight.expected)
            self.flights.remove(flight)
        self.groups.pop(number).free()


def run_case(comm: Communicator, seed: list[int], compare: Compare) -> None:
    """Carry out a random program on a random pile of wrappers. Collective: all ranks call it."""
    rng = np.random.default_rng(seed)
    names = draw_wrappers(rng)
    try:
        with comm.split(0) as group:
            wrapped = wrap(group, names)
            Program(wrapped, rng, compare).run()
            wrapped.free()
    except Exception as error:
        error.add_note(f"through {names}")
        raise


def main(name: str, first: int, seconds: float) -> None:
    """Run cases on all MPI ranks until the time of rank 0 is over; rank 0 prints the counts."""
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    end, comm, comparisons, number = time.monotonic() + seconds, create_communicator(), 0, first

    def compare(found: Any, expected: Any) -> None:
        nonlocal comparisons
        comparisons += 1
        np.testing.assert_array_equal(found, expected)

    goes_on = True
    while goes_on:
        seed = [zlib.crc32(name.encode()), number]
        ranks = int(np.random.default_rng(seed).integers(1, comm.size + 1))
        with comm.split(int(comm.rank < ranks)) as group:
            if comm.rank < ranks:
                try:
                    run_case(group, seed, compare)
                except Exception as error:
                    notes = " ".join(getattr(error, "__notes__", ()))
                    raise RuntimeError(f"case {number} {notes}: {error}") from error
        number += 1
        goes_on = comm.gather_object(time.monotonic() < end)[0]
    total = sum(comm.gather_object(comparisons))
    if comm.rank == 0:
        print(json.dumps({"cases": number - first, "comparisons": total}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
