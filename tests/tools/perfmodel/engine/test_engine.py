"""The order of events, and what ranks wait for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pydtnn.comm.thread import start_ranks
from pydtnn.tools.perfmodel.engine import Completion, Engine
from pydtnn.tools.perfmodel.network import Network


def run(ranks: int, program: Callable[[Engine, int], None]) -> Engine:
    engine = Engine(Network.create("abc"[:ranks], latency=1e-3, bandwidth=1e9))

    def rank(number: int) -> None:
        try:
            program(engine, number)
        except BaseException as error:
            engine.leave(number, error)
        else:
            engine.leave(number)

    start_ranks(ranks, rank, engine.end)
    if engine.failure is not None:
        raise engine.failure
    return engine


def complete_at(engine: Engine, rank: int, seconds: float) -> Completion:
    """Return what is complete some time after the present one of a rank."""
    done = Completion(rank)
    engine.post(
        rank, lambda: engine.at(engine.now + seconds, lambda: engine.complete(done, engine.now))
    )
    return done


def test_events_are_executed_in_the_order_of_virtual_time():
    seen: list[tuple[float, int]] = []

    def program(engine: Engine, rank: int) -> None:
        for _ in range(3):  # the last rank is the first in virtual time
            engine.spend(rank, 1.0 / (rank + 1))
            engine.post(rank, lambda: seen.append((engine.now, rank)))
        engine.wait(rank, complete_at(engine, rank, 0.0), str)

    run(3, program)
    assert seen == sorted(seen)
    assert len(seen) == 9


def test_a_wait_advances_to_the_completion_and_never_back():
    def program(engine: Engine, rank: int) -> None:
        done = complete_at(engine, rank, 2.0)
        engine.wait(rank, done, str)
        assert engine.clock(rank) == 2.0
        later = complete_at(engine, rank, 1.0)
        engine.spend(rank, 5.0)
        for completed in (later, done):
            engine.wait(rank, completed, str)
            assert engine.clock(rank) == 7.0

    run(1, program)


def test_a_pause_ends_with_the_next_completion():
    def program(engine: Engine, rank: int) -> None:
        for seconds in (1.0, 2.0):
            complete_at(engine, rank, seconds)
        engine.pause(rank)
        assert engine.clock(rank) == 1.0
        engine.pause(rank)
        assert engine.clock(rank) == 2.0
        complete_at(engine, rank, 0.0)
        engine.spend(rank, 1.0)
        engine.wait(rank, complete_at(engine, rank, 0.0), str)
        engine.pause(rank)  # one has been completed meanwhile
        assert engine.clock(rank) == 3.0

    run(1, program)


def test_an_error_of_an_action_ends_the_run():
    def program(engine: Engine, rank: int) -> None:
        def broken() -> None:
            raise MemoryError("no memory")

        engine.post(rank, broken)
        engine.wait(rank, Completion(rank), str)

    with pytest.raises(MemoryError, match="no memory"):
        run(2, program)


def test_a_loop_of_tests_ends_shortly_after_the_completion():
    def program(engine: Engine, rank: int) -> None:
        done = complete_at(engine, rank, 1e-3)
        while not engine.test(rank, done):
            pass
        assert 1e-3 <= engine.clock(rank) <= 1.01e-3

    run(1, program)
