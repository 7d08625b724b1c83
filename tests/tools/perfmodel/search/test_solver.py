from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from pydtnn.tools.perfmodel.search.solver import State, Unit, UnitOption, solve
from tests.each import each


class Random:
    """A random graph whose units have options with random times, memory and exchanges."""

    def __init__(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        self.units = []
        for index in range(count):
            sources = rng.permutation(index)[: rng.integers(1, 3)] if index else []
            self.units.append(Unit(f"u{index}", tuple(int(i) for i in sorted(sources))))
        self.kinds = int(rng.integers(2, 4))
        self.seconds = rng.integers(1, 50, (count, self.kinds))
        self.memory = rng.integers(0, 20, (count, self.kinds))
        self.exchange = rng.integers(0, 30, (count, self.kinds, self.kinds))

    def options(self, index: int, states: tuple[State, ...]) -> Iterator[UnitOption]:
        """Options require their inputs in their own layout; an exchange happens once."""
        for kind in range(self.kinds):
            time, after = int(self.seconds[index, kind]), []
            for source, state in zip(self.units[index].inputs, states, strict=True):
                native, *more = state  # type: ignore[misc]
                if kind != native and kind not in more:
                    time += int(self.exchange[source, native, kind])
                    more = sorted([*more, kind])
                after.append((native, *more))
            yield UnitOption(str(kind), tuple(after), (kind,), time, int(self.memory[index, kind]))

    def brute_force(self) -> list[tuple[float, float]]:
        """Time and memory of every choice."""
        found = []
        for kinds in product(range(self.kinds), repeat=len(self.units)):
            states: dict[int, State] = {}
            time = memory = 0.0
            for index, kind in enumerate(kinds):
                inputs = tuple(states[i] for i in self.units[index].inputs)
                option = [*self.options(index, inputs)][kind]
                states |= dict(zip(self.units[index].inputs, option.inputs, strict=True))
                states[index] = option.output
                time, memory = time + option.seconds, memory + option.memory
            found.append((time, memory))
        return found


@each("seed", range(8))
def test_the_fastest_choice_is_that_of_brute_force(seed):
    case = Random(seed, 6)
    (found,) = solve(case.units, case.options)
    assert found.seconds == min(time for time, _ in case.brute_force())


@each("seed", range(8))
def test_with_a_limit_of_memory_all_choices_that_nothing_beats_are_found(seed):
    case = Random(seed, 5)
    every = case.brute_force()
    limit = float(np.median([memory for _, memory in every]))
    possible = [(time, memory) for time, memory in every if memory <= limit]
    front = sorted(
        {
            one
            for one in possible
            if not any(o != one and o <= one and o[1] <= one[1] for o in possible)
        }
    )
    found = solve(case.units, case.options, memory_limit=limit, most=1000)
    assert [(s.seconds, s.memory) for s in found] == front
    assert solve(case.units, case.options, memory_limit=-1.0) == []


def test_few_kept_choices_contain_the_fastest_and_the_smallest():
    case = Random(3, 12)
    limit = float(case.memory.max(axis=1).sum())
    every = solve(case.units, case.options, memory_limit=limit, most=10_000)
    few = solve(case.units, case.options, memory_limit=limit, most=4)
    assert few[0].seconds == every[0].seconds
    assert few[-1].memory == every[-1].memory
    assert len(few) <= 4 < len(every)


def test_an_exchange_that_two_units_read_is_paid_once():
    """a -> b, a -> c, b and c in another layout than a: 1 + 1 + 1 + 10, not + 20."""
    units = [Unit("a", ()), Unit("b", (0,)), Unit("c", (0, 1))]

    def options(index: int, states: tuple[State, ...]) -> list[UnitOption]:
        if index == 0:
            return [UnitOption("0", (), (0,), 1.0)]
        first = states[0]
        after = ((0, 1), *((1,) for _ in states[1:]))
        return [UnitOption("1", after, (1,), 1.0 if first == (0, 1) else 11.0)]

    (found,) = solve(units, options)
    assert found.seconds == 13.0
    assert found.names == ("0", "1", "1")
