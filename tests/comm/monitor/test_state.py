"""A model of the states of a run: all sequences of events, and random ones of several ranks."""

from __future__ import annotations

import itertools
import random

from pydtnn.comm.monitor.state import (
    FAILED,
    LEFT,
    LOST,
    STARTED,
    TRANSITIONS,
    LastStepVote,
    RunState,
    WatchedRun,
)
from tests.each import each

EVENTS = sorted({event for _, event in TRANSITIONS})
ENDS = ("report", "end", "table")
"""Actions that end a run, unless the rank that is reported is killed."""


def check_ends_once(begin: RunState, events: tuple[str, ...]) -> None:
    run, ended = WatchedRun([0, 1], begin), 0
    for event in events:
        before = run.state
        actions = run.on(event)
        ends = "kill" not in actions and any(action in ENDS for action in actions)
        assert ends == (run.state is RunState.ENDING and before is not RunState.ENDING)
        ended += ends
        assert not (actions and before in (RunState.ENDING, RunState.ENDED))
        assert run.state.value >= before.value  # no state comes again
    assert ended <= 1


@each("begin", [*RunState])
def test_a_run_ends_at_most_once_whatever_is_reported(begin):
    for events in itertools.product(EVENTS, repeat=4):
        check_ends_once(begin, events)


def test_every_phase_but_the_last_has_an_exit_and_can_be_reached():
    for state in [*RunState][:-1]:
        assert any(before is state and after is not state for (before, _), (after, _) in MOVES)
    reached = {RunState.STARTING}
    for _ in RunState:
        reached |= {after for (before, _), (after, _) in MOVES if before in reached}
    assert reached == {*RunState}


MOVES = [*TRANSITIONS.items()]


@each("seed", range(20))
def test_each_rank_ends_once_and_in_one_way(seed):
    random_ = random.Random(seed)
    run = WatchedRun(range(4), random_.choice([RunState.RUNNING, RunState.REPORTED]))
    gone: dict[int, str] = {}
    for _ in range(40):
        rank, state = random_.randrange(4), random_.choice([LEFT, LEFT, LOST, FAILED])
        before, actions = run.state, run.end_of(rank, state)
        if rank in gone:  # a rank that has left is never said to have failed, nor a lost one again
            assert actions == ()
        elif state != LEFT and before in (RunState.RUNNING, RunState.REPORTED):
            go_on = state == LOST and before is RunState.RUNNING
            assert actions == (("go on",) if go_on else ("report", "end"))
        else:
            assert actions == ()
        gone.setdefault(rank, state)
        assert run.ranks == {rank: gone.get(rank, STARTED) for rank in range(4)}
        assert (run.state is RunState.ENDED) == (len(gone) == 4)


def test_a_rank_is_excluded_once_and_only_while_the_run_goes_on():
    run = WatchedRun(range(3))
    assert run.exclude([1]) == [1]
    assert run.exclude([1, 2, 5]) == [2, 5]  # the last on another host
    assert run.end_of(1, LOST) == ("go on",)
    assert run.exclude([1]) == []
    run.on("end")
    assert run.exclude([0]) == []


def test_a_stopped_rank_is_killed_while_the_others_start_and_a_failed_one_ends_them():
    run = WatchedRun([0, 1], RunState.STARTING)
    assert run.on(LOST) == ("report", "kill")
    assert run.on(FAILED) == ("report", "end")
    assert run.on("late") == ()


@each("seed", range(20))
def test_every_request_for_the_last_step_is_decided_once_for_the_ranks_that_remain(seed):
    random_, told = random.Random(seed), list[tuple[object, ...]]()
    vote = LastStepVote(3, lambda *message: told.append(message))
    ranks, now = {0, 1, 2}, 100.0
    while ranks:
        now += random_.choice([1.0, 30.0])
        event = random_.randrange(5)
        if event < 2:
            vote.request(15, random_.choice(sorted(ranks)), now)
        elif event == 2 and random_.random() < 0.2:
            ranks.remove(lost := random_.choice(sorted(ranks)))
            vote.lose(lost)
        elif event == 3 and random_.random() < 0.2:
            vote.give_up()
        else:
            vote.answer(random_.choice(sorted(ranks)), random_.randrange(-1, 9))
    names = [message[0] for message in told]
    assert names == ["freeze", "last"] * (len(names) // 2)
