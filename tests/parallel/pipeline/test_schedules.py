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
    backward_inputs,
    backward_parameters,
    bubble,
    check,
    find,
    forward,
)
from pydtnn.parallel.pipeline.check import StageTime, carry_out, plan_of
from pydtnn.parallel.pipeline.picture import text
from tests.each import each

NAMES = sorted({*PIPELINE_SCHEDULES} - {"chimera", "dualpipe"})  # those for odd numbers of ranks
SIZES = [(stages, micro) for stages in range(1, 6) for micro in range(1, 9)]


PAPERS = [4, 8, 16]
"""Stages for which bubbles are compared with the formulas of papers."""


@each("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_the_bubble_counted_from_a_schedule_is_that_of_the_formula(name: str) -> None:
    for stages, micro_batches in SIZES:
        counted = check(name, stages, micro_batches).bubble
        assert counted == pytest.approx(bubble(stages, micro_batches), abs=1e-12)


@each("stages", PAPERS)
@each(("f", "b", "w"), [(1, 1, 1), (10, 12, 8), (10, 11, 10)])
def test_stages_wait_as_long_as_in_the_formulas_of_papers(
    stages: int, f: int, b: int, w: int
) -> None:
    """Qi et al., section 2.2, table 1, with the times of forward and of the halves of backward."""
    times = {"forward": f, "backward": b + w, "parameters": w}
    waiting = {name: check(name, stages, 3 * stages, **times).waiting for name in NAMES}
    assert waiting["1f1b"] == (stages - 1) * (f + b + w)
    assert waiting["zb_h1"] == (stages - 1) * (f + b - w)
    assert waiting["zb_2p"] == (stages - 1) * (f + b - 2 * w)
    if f == b == w:
        assert waiting["zb_h1"] <= 0.4 * waiting["1f1b"]


def test_a_step_of_zb_h1_has_a_third_of_the_bubble_of_1f1b() -> None:
    for stages in PAPERS:
        work = 3 * 3 * stages
        idle = {name: check(name, stages, 3 * stages).duration - work for name in NAMES}
        assert idle["zb_h1"] == idle["1f1b"] / 3 == stages - 1


def test_zb_h1_keeps_as_many_micro_batches_as_the_first_stage_of_1f1b_and_zb_2p_twice() -> None:
    for stages, micro_batches in SIZES:
        kept = {name: check(name, stages, micro_batches).in_flight for name in NAMES}
        assert max(kept["zb_h1"]) == max(kept["1f1b"])
        assert kept["zb_h1"] == (min(stages, micro_batches),) * stages
        assert kept["zb_2p"] == (min(2 * stages - 1, micro_batches),) * stages


def test_gpipe_keeps_all_micro_batches_and_1f1b_at_most_one_per_following_stage() -> None:
    for stages, micro_batches in SIZES:
        kept = {name: check(name, stages, micro_batches).in_flight for name in NAMES}
        assert kept["gpipe"] == (micro_batches,) * stages
        assert kept["1f1b"] == tuple(min(stages - s, micro_batches) for s in range(stages))
        eager = (min(2 * (stages - s) - 1, micro_batches) for s in range(stages))
        assert kept["eager_1f1b"] == tuple(eager)


@each("name", NAMES)
def test_backward_passes_are_in_the_order_of_the_samples(name: str) -> None:
    for stage in range(3):
        actions = actions_of(name, stage, 3, 5)
        for own in {action.stage for action in actions}:
            for kinds in (("backward", "backward_inputs"), ("backward", "backward_parameters")):
                order = [a.micro_batch for a in actions if a.kind in kinds and a.stage == own]
                assert order == [*range(5)]


def plan(name: str = "1f1b") -> list[list[Action]]:
    return [[*actions_of(name, stage, 3, 4)] for stage in range(3)]


def broken(change: str) -> list[list[Action]]:
    actions = plan("zb_h1" if "halves" in change else "1f1b")
    own = actions[1]
    if change == "missing forward":
        own.remove(forward(2, 1))
    elif change == "missing backward":
        own.remove(backward(3, 1))
    elif change == "twice":
        own.append(backward(0, 1))
    elif change == "backward first":
        a, b = own.index(forward(3, 1)), own.index(backward(3, 1))
        own[a], own[b] = own[b], own[a]
    elif change == "negative":
        own.append(forward(-1, 1))
    elif change == "halves: dw twice":
        own.append(backward_parameters(2, 1))
    elif change == "halves: dw forgotten":
        own.remove(backward_parameters(2, 1))
    elif change == "halves: dx before its input":
        own.remove(backward_inputs(3, 1))
        own.insert(own.index(forward(3, 1)), backward_inputs(3, 1))
    elif change == "halves: dw before dx":
        own.remove(backward_parameters(3, 1))
        own.insert(own.index(backward_inputs(3, 1)), backward_parameters(3, 1))
    elif change == "halves: beside one piece":
        own.remove(backward_parameters(3, 1))
        own[own.index(backward_inputs(3, 1))] = backward(3, 1)
    elif change == "halves: deadlock":
        actions[2].remove(backward_inputs(0, 2))
        actions[2].insert(actions[2].index(backward_parameters(0, 2)), backward_inputs(0, 2))
    elif change == "deadlock":  # the last stage returns 1 before 0, and stage 1 needs 0 for 2
        actions[2] = [*map(forward, range(4)), *map(backward, range(4))]
        actions[1] = [forward(0), backward(0), *map(forward, (1, 2, 3)), *map(backward, (1, 2, 3))]
    return actions


@each(
    ("change", "message"),
    [
        ("missing forward", "stage 1 lacks forward 2; add it"),
        ("missing backward", "stage 1 lacks backward 3; add it"),
        ("twice", "stage 1 has backward 0 2 times; keep one"),
        ("backward first", "stage 1 has backward 3 before forward 3; swap them"),
        ("negative", "stage 1 has forward -1, but micro-batches are 0 to 3; remove it"),
        ("deadlock", "deadlock: .*stage 1 waits in backward 0 for stage 2, stage 2 waits in"),
        ("halves: dw twice", "stage 1 has backward_parameters 2 2 times; keep one"),
        ("halves: dw forgotten", "stage 1 lacks backward_parameters 2; add it"),
        (
            "halves: dx before its input",
            "stage 1 has backward_inputs 3 before forward 3; swap them",
        ),
        (
            "halves: dw before dx",
            "stage 1 has backward_parameters 3 before backward_inputs 3; swap them",
        ),
        ("halves: beside one piece", "stage 1 has backward 3 in one piece, and others in two"),
        ("halves: deadlock", "stage 1 waits in backward_inputs 0 for stage 2"),
    ],
)
def test_the_checker_refuses_broken_schedules(change: str, message: str) -> None:
    assert check(plan()).micro_batches == 4
    with pytest.raises(PipelineError, match=message):
        check(broken(change))


def several(change: str) -> list[list[Action]]:
    """A plan of two stages per rank with an error."""
    actions = [[*actions_of("zb_v", rank, 2, 3)] for rank in range(2)]
    own = actions[1]  # of stages 1 and 2
    if change == "dw twice":
        own.append(backward_parameters(2, 2))
    elif change == "dw of the other stage":
        own[own.index(backward_parameters(2, 2))] = backward_parameters(2, 1)
    elif change == "chunks in the wrong order":
        own.remove(forward(0, 2))
        own.insert(0, forward(0, 2))
    elif change == "a stage on two ranks":
        actions[0] += [forward(0, 1), backward(0, 1)]
    elif change == "a stage left out":
        actions[:] = [[a for a in row if a.stage != 2] for row in actions]
    elif change == "chunks swapped":
        own[:] = [action._replace(stage=3 - action.stage) for action in own]
    return actions


@each(
    ("change", "message"),
    [
        ("dw twice", "stage 2 has backward_parameters 2 2 times; keep one"),
        ("dw of the other stage", "stage 1 has backward_parameters 2 2 times; keep one"),
        ("chunks in the wrong order", "deadlock: .*stage 2 waits in forward 0 for stage 1; change"),
        ("a stage on two ranks", "stage 1 is on rank 0 and on rank 1; keep the actions of one"),
        ("a stage left out", "no rank has stage 2, but one has 3; number stages from 0"),
        ("chunks swapped", "deadlock: .*stage 2 waits in forward 0 for stage 1"),
    ],
)
def test_the_checker_refuses_several_stages_per_rank_that_are_wrong(
    change: str, message: str
) -> None:
    assert check(several("")).owners.paths == ((0, 1, 1, 0),)
    with pytest.raises(PipelineError, match=message):
        check(several(change))


@each("ranks", PAPERS)
@each("chunks", [2, 3, 4])
def test_interleaved_stages_divide_the_bubble_by_their_number(ranks: int, chunks: int) -> None:
    """Narayanan et al., section 2.2, and the values kept by each rank."""
    for micro_batches in (ranks, 3 * ranks):
        done = check(f"interleaved:{chunks}", ranks, micro_batches)
        assert done.bubble == pytest.approx(bubble(ranks, micro_batches, chunks), abs=1e-12)
        kept = [ranks + (ranks - 1 - 2 * rank) / chunks for rank in range(ranks)]
        assert done.in_flight == pytest.approx([min(n, micro_batches) for n in kept])
        assert done.messages == 2 * (chunks * ranks - 1) * micro_batches


@each("ranks", PAPERS)
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(ranks: int) -> None:
    done = check("zb_v", ranks, 3 * ranks, forward=1, backward=2)
    assert done.waiting == 0
    assert done.duration == 2 * 3 * 3 * ranks + ranks - 1
    assert done.in_flight == (ranks,) * ranks


@each("name", ["interleaved", "interleaved:3", "zb_v"])
def test_several_stages_per_rank_are_right_for_any_numbers(name: str) -> None:
    for ranks, micro_batches in SIZES:
        assert check(name, ranks, micro_batches).micro_batches == micro_batches


@each("ranks", [2, *PAPERS])
def test_the_bubble_and_the_memory_of_chimera_are_those_of_the_paper(ranks: int) -> None:
    """Li and Hoefler, sections 3.1 and 3.5, table 2."""
    for units in (1, 2, 5):
        micro_batches = units * ranks
        done = check("chimera", ranks, micro_batches, forward=1, backward=1)
        assert done.bubble == pytest.approx((ranks - 2) / (2 * micro_batches + ranks - 2))
        kept = [ranks // 2 + 1 + min(r, ranks - 1 - r) for r in range(ranks)]
        assert done.in_flight == tuple(number / 2 for number in kept)
        assert done.messages == 2 * (ranks - 1) * micro_batches
        done = check("chimera", ranks, micro_batches, forward=1, backward=2)
        assert done.duration == 3 * micro_batches + (units + 1) * (ranks - 2)
    done = check("chimera", ranks, ranks, forward=1, backward=2)
    assert done.bubble == pytest.approx((ranks - 2) / (1.5 * ranks + ranks - 2))


@each("ranks", [2, *PAPERS])
def test_dualpipe_waits_half_as_long_as_zb_h1_and_keeps_a_micro_batch_more_than_chimera(
    ranks: int,
) -> None:
    for micro_batches in (2 * ranks, 5 * ranks):
        done = check("dualpipe", ranks, micro_batches, forward=1, backward=2)
        assert done.waiting == 0
        assert done.duration == 3 * micro_batches + ranks // 2 - 1
        assert done.in_flight == ((ranks + 1) / 2,) * ranks
        assert done.has_halves


@each("name", ["chimera", "dualpipe"])
def test_two_directions_are_right_for_any_numbers_of_which_that_of_ranks_is_even(name: str) -> None:
    for ranks, micro_batches in SIZES:
        if ranks % 2:
            with pytest.raises(PipelineError, match=f"expected an even number of .*got {ranks};"):
                check(name, ranks, micro_batches)
        else:
            assert check(name, ranks, micro_batches).micro_batches == micro_batches


def two_ways(change: str) -> list[list[Action]]:
    """A plan in two directions with an error."""
    actions = [[*actions_of("chimera", rank, 4, 4)] for rank in range(4)]
    if change == "a whole stage twice":
        actions[3] += [forward(0, 0), backward(0, 0)]
    elif change == "a pass twice":
        actions[3].remove(backward(1, 0))
        actions[0].append(backward(1, 0))
    elif change == "a stage elsewhere":
        even, odd = (
            [[a for a in own if a.micro_batch % 2 == m] for own in actions] for m in (0, 1)
        )
        actions[2:] = [even[2] + odd[3], even[3] + odd[2]]
    elif change == "a copy left out":
        actions[3] = [a for a in actions[3] if a.stage != 0]
    elif change == "one way before the other":
        actions[1].sort(key=lambda a: (a.micro_batch % 2, a.kind == "backward"))
    return actions


@each(
    ("change", "message"),
    [
        ("a whole stage twice", "stage 0 is on rank 0 and on rank 3; keep the actions of one"),
        ("a pass twice", "stage 0 is on rank 0 and on rank 3; keep the actions of one"),
        ("a stage elsewhere", "stage 0 is on rank 0 and on rank .*, whose other stages differ"),
        ("a copy left out", "stage 3 is on rank 3 and on rank 0, whose other stages differ; give"),
        ("one way before the other", "deadlock: .*waits in"),
    ],
)
def test_the_checker_refuses_plans_in_two_directions_that_are_wrong(
    change: str, message: str
) -> None:
    assert check(two_ways("")).owners.paths == ((0, 1, 2, 3), (3, 2, 1, 0))
    with pytest.raises(PipelineError, match=message):
        check(two_ways(change))


def test_an_empty_schedule_is_refused() -> None:
    with pytest.raises(PipelineError, match="stage 0 lacks forward 0; add it"):
        check(lambda stage, stages, micro_batches: [], 2, 2)


@each("returned", [None, [("forward", 0)], [Action("update", 0)]])
def test_functions_that_return_something_else_are_refused(returned: Any) -> None:
    with pytest.raises(TypeError, match="lambda.*: .*actions"):
        check(lambda stage, stages, micro_batches: returned, 2, 2)


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ValueError, match="unknown pipeline schedule '1f1', did|did you mean"):
        find("1f1")


@each("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_slowest_stage_determines_the_time(schedule: str) -> None:
    stages = [StageTime(1.0, 2.0), StageTime(2.0, 4.0)]
    done = carry_out(plan_of(schedule, 2, 100), lambda action: stages[action.stage])
    assert done.duration == max(done.ends) == pytest.approx(600, rel=0.02)


def test_messages_delay_the_stages_that_wait_for_them() -> None:
    fast, slow = (
        carry_out(plan_of("gpipe", 2, 1), lambda _: StageTime(1.0, 2.0, wire, wire)).duration  # noqa: B023
        for wire in (0.0, 0.5)
    )
    assert (fast, slow) == (6, 7)


def test_the_text_shows_both_halves_of_backward() -> None:
    lines = text("zb_h1", check("zb_h1", 2, 2)).splitlines()
    assert lines[1].endswith("b0: gradients of inputs, w0: of parameters")
    assert lines[-2:] == ["stage 0  f0 f1    b0 w0 b1 w1", "stage 1     f0 b0 f1 b1 w0 w1"]


def test_the_text_shows_both_directions() -> None:
    lines = text("chimera", check("chimera", 2, 2, forward=1, backward=1)).splitlines()
    assert lines[-2:] == ["stages 0, 1  f0  f1' b1' b0", "stages 0, 1  f1  f0' b0' b1"]


def test_the_text_shows_when_each_stage_computes_what() -> None:
    lines = text("gpipe", check("gpipe", 2, 2)).splitlines()
    assert lines[-2:] == ["stage 0  f0 f1          b0 b0 b1 b1", "stage 1     f0 f1 b0 b0 b1 b1"]
