"""Pipeline schedules: order, bubble, memory, and the checker that refuses broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn.parallel.pipeline import (
    PIPELINE_SCHEDULES,
    Action,
    PipelineError,
    actions_of,
    backward,
    bubble,
    check,
    find,
    forward,
)
from pydtnn.parallel.pipeline.picture import text

NAMES = sorted(PIPELINE_SCHEDULES)
SIZES = [(stages, micro) for stages in range(1, 6) for micro in range(1, 9)]


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_counted_from_a_schedule_is_that_of_the_formula(name: str) -> None:
    for stages, micro_batches in SIZES:
        counted = check(name, stages, micro_batches).bubble
        assert counted == pytest.approx(bubble(stages, micro_batches), abs=1e-12)


def test_gpipe_keeps_all_micro_batches_and_1f1b_at_most_one_per_following_stage() -> None:
    for stages, micro_batches in SIZES:
        kept = {name: check(name, stages, micro_batches).in_flight for name in NAMES}
        assert kept["gpipe"] == (micro_batches,) * stages
        assert kept["1f1b"] == tuple(min(stages - s, micro_batches) for s in range(stages))
        eager = (min(2 * (stages - s) - 1, micro_batches) for s in range(stages))
        assert kept["eager_1f1b"] == tuple(eager)


@pytest.mark.parametrize("name", NAMES)
def test_backward_passes_are_in_the_order_of_the_samples(name: str) -> None:
    for stage in range(3):
        actions = actions_of(name, stage, 3, 5)
        assert [a.micro_batch for a in actions if a.kind == "backward"] == [*range(5)]


def plan() -> list[list[Action]]:
    return [[*actions_of("1f1b", stage, 3, 4)] for stage in range(3)]


def broken(change: str) -> list[list[Action]]:
    actions = plan()
    own = actions[1]
    if change == "missing forward":
        own.remove(forward(2))
    elif change == "missing backward":
        own.remove(backward(3))
    elif change == "twice":
        own.append(backward(0))
    elif change == "backward first":
        a, b = own.index(forward(3)), own.index(backward(3))
        own[a], own[b] = own[b], own[a]
    elif change == "negative":
        own.append(forward(-1))
    elif change == "deadlock":  # the last stage returns 1 before 0, and stage 1 needs 0 for 2
        actions[2] = [*map(forward, range(4)), *map(backward, range(4))]
        actions[1] = [forward(0), backward(0), *map(forward, (1, 2, 3)), *map(backward, (1, 2, 3))]
    return actions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing forward", "stage 1 lacks forward 2; add it"),
        ("missing backward", "stage 1 lacks backward 3; add it"),
        ("twice", "stage 1 has backward 0 2 times; keep one"),
        ("backward first", "stage 1 has backward 3 before forward 3; swap them"),
        ("negative", "stage 1 has forward -1, but micro-batches are 0 to 3; remove it"),
        ("deadlock", "deadlock: .*stage 1 waits in backward 0 for stage 2, stage 2 waits in"),
    ],
)
def test_the_checker_refuses_broken_schedules(change: str, message: str) -> None:
    assert check(plan()).micro_batches == 4
    with pytest.raises(PipelineError, match=message):
        check(broken(change))


def test_an_empty_schedule_is_refused() -> None:
    with pytest.raises(PipelineError, match="stage 0 lacks forward 0; add it"):
        check(lambda stage, stages, micro_batches: [], 2, 2)


@pytest.mark.parametrize("returned", [None, [("forward", 0)], [Action("update", 0)]])
def test_functions_that_return_something_else_are_refused(returned: Any) -> None:
    with pytest.raises(TypeError, match="lambda.*: .*actions"):
        check(lambda stage, stages, micro_batches: returned, 2, 2)


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ValueError, match="unknown pipeline schedule '1f1', did|did you mean"):
        find("1f1")


def test_the_text_shows_when_each_stage_computes_what() -> None:
    lines = text("gpipe", check("gpipe", 2, 2)).splitlines()
    assert lines[-2:] == ["stage 0  f0 f1          b0 b0 b1 b1", "stage 1     f0 f1 b0 b0 b1 b1"]
