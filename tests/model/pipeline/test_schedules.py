"""Pipeline schedules: order, bubble, memory, and the checker that refuses broken ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pydtnn.model.pipeline import (
    PIPELINE_SCHEDULES,
    Action,
    PipelineError,
    actions_of,
    backward,
    backward_inputs,
    backward_parameters,
    check,
    find,
    forward,
    placement,
    steady_bubble,
)
from pydtnn.model.pipeline.check import StageTime, carry_out, plan_of
from pydtnn.tools.schedules.pipeline_picture import text
from tests.each import each

NAMES = sorted({*PIPELINE_SCHEDULES} - {"chimera", "dualpipe"})  # those for odd numbers of ranks
SIZES = [(stages, micro) for stages in range(1, 6) for micro in range(1, 9)]


PAPERS = [4, 8, 16]
"""Stages for which bubbles are compared with the formulas of papers."""


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The part of a step in which a rank waits, with equal stages and messages without time."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


@each("stages", PAPERS)
@each(("f", "b", "w"), [(1, 1, 1), (10, 12, 8), (10, 11, 10)])
def test_stages_wait_as_long_as_in_the_formulas_of_papers(stages, f, b, w):
    """Qi et al., section 2.2, table 1, with the times of forward and of the halves of backward."""
    times = {"forward": f, "backward": b + w, "parameters": w}
    waiting = {name: check(name, stages, 3 * stages, **times).waiting for name in NAMES}
    assert waiting["1f1b"] == (stages - 1) * (f + b + w)
    assert waiting["zb_h1"] == (stages - 1) * (f + b - w)
    assert waiting["zb_2p"] == (stages - 1) * (f + b - 2 * w)
    if f == b == w:
        assert waiting["zb_h1"] <= 0.4 * waiting["1f1b"]


def test_bubbles_and_values_kept_are_those_of_the_formulas_for_any_numbers():
    for n, micro_batches in SIZES:
        done = {name: check(name, n, micro_batches) for name in (*NAMES, "interleaved:3")}
        for name in ("gpipe", "1f1b", "eager_1f1b"):
            assert done[name].bubble == pytest.approx(bubble(n, micro_batches), abs=1e-12)
        kept = {name: one.in_flight for name, one in done.items()}
        assert kept["gpipe"] == (micro_batches,) * n
        assert kept["1f1b"] == tuple(min(n - s, micro_batches) for s in range(n))
        assert kept["eager_1f1b"] == tuple(min(2 * (n - s) - 1, micro_batches) for s in range(n))
        assert kept["zb_h1"] == (min(n, micro_batches),) * n
        assert kept["zb_2p"] == (min(2 * n - 1, micro_batches),) * n
        for name in ("chimera", "dualpipe"):  # the number of ranks is even
            if n % 2:
                with pytest.raises(PipelineError, match=f"an even number of .*got {n};"):
                    check(name, n, micro_batches)
            else:
                assert check(name, n, micro_batches).micro_batches == micro_batches


@each("name", NAMES)
def test_backward_passes_are_in_the_order_of_the_samples(name):
    for stage in range(3):
        actions = actions_of(name, stage, 3, 5)
        for own in {action.stage for action in actions}:
            for kinds in (("backward", "backward_inputs"), ("backward", "backward_parameters")):
                order = [a.micro_batch for a in actions if a.kind in kinds and a.stage == own]
                assert order == [*range(5)]


@each("ranks", PAPERS)
@each("chunks", [2, 3, 4])
def test_interleaved_stages_divide_the_bubble_by_their_number(ranks, chunks):
    """Narayanan et al., section 2.2, and the values kept by each rank."""
    for micro_batches in (ranks, 3 * ranks):
        done = check(f"interleaved:{chunks}", ranks, micro_batches)
        assert done.bubble == pytest.approx(bubble(ranks, micro_batches, chunks), abs=1e-12)
        kept = [ranks + (ranks - 1 - 2 * rank) / chunks for rank in range(ranks)]
        assert done.in_flight == pytest.approx([min(n, micro_batches) for n in kept])


@each("ranks", PAPERS)
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(ranks):
    done = check("zb_v", ranks, 3 * ranks, forward=1, backward=2)
    assert done.waiting == 0
    assert done.duration == 2 * 3 * 3 * ranks + ranks - 1
    assert done.in_flight == (ranks,) * ranks


@each("ranks", [2, 3, 5])
@each(("f", "b"), [(1, 1), (1, 2), (3, 2)])
def test_2bw_has_no_bubble_in_further_steps_and_the_memory_of_1f1b(ranks, f, b):
    """Narayanan et al. 2021, section 3.1; a pipeline that is emptied once waits as 1F1B."""
    for n in (ranks - 1, ranks, 3 * ranks):
        assert steady_bubble("2bw", ranks, n, forward=f, backward=b) == 0
        assert check("2bw", ranks, n, steps=3).in_flight == (*range(ranks, 0, -1),)
        assert check("2bw", ranks, n).events == check("1f1b", ranks, n).events
        assert steady_bubble("1f1b", ranks, n) == pytest.approx(bubble(ranks, n))


@each("ranks", [2, *PAPERS])
def test_the_bubble_and_the_memory_of_chimera_are_those_of_the_paper(ranks):
    """Li and Hoefler, sections 3.1 and 3.5, table 2."""
    for units in (1, 2, 5):
        micro_batches = units * ranks
        done = check("chimera", ranks, micro_batches, forward=1, backward=1)
        assert done.bubble == pytest.approx((ranks - 2) / (2 * micro_batches + ranks - 2))
        kept = [ranks // 2 + 1 + min(r, ranks - 1 - r) for r in range(ranks)]
        assert done.in_flight == tuple(number / 2 for number in kept)
        done = check("chimera", ranks, micro_batches, forward=1, backward=2)
        assert done.duration == 3 * micro_batches + (units + 1) * (ranks - 2)
    done = check("chimera", ranks, ranks, forward=1, backward=2)
    assert done.bubble == pytest.approx((ranks - 2) / (1.5 * ranks + ranks - 2))


@each("ranks", [2, *PAPERS])
def test_dualpipe_waits_half_as_long_as_zb_h1_and_keeps_a_micro_batch_more_than_chimera(ranks):
    for micro_batches in (2 * ranks, 5 * ranks):
        done = check("dualpipe", ranks, micro_batches, forward=1, backward=2)
        assert done.waiting == 0
        assert done.duration == 3 * micro_batches + ranks // 2 - 1
        assert done.in_flight == ((ranks + 1) / 2,) * ranks
        assert done.has_halves


FEW = ["2x2-3", "3x2-1-2", "4x3-5-10", "3x1-0-1", "4x1-0"]

MANY = [
    *(f"{d}x{s}-{p}" for d in (2, 3, 4) for s in (1, 2, 4) for p in range(d * s)),
    *("3x2", "4x4-5-10", "4x4-1-5-9", "4x4-0-1-2-3", "8x4-5", "8x3-0-4-8"),
]


@pytest.mark.parametrize("grids", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_peers_compute_the_micro_batches_of_lost_ranks_within_the_memory_of_1f1b(grids):
    for grid in grids:
        pipelines, stages, *lost = map(int, re.findall(r"\d+", grid))
        ranks = pipelines * stages - len(lost)
        paths = placement(f"recycle:{grid}", ranks).paths
        for number in (3 * pipelines, 3 * pipelines - 1, 1):
            done = check(f"recycle:{grid}", ranks, number)  # every pass once, without a deadlock
            own = [tuple(done.owners.of(s, m) for s in range(stages)) for m in range(number)]
            assert own == [paths[m % len(paths)] for m in range(number)]
            assert max(done.in_flight) <= stages
            busiest = max(len(done.of(rank)) for rank in range(done.ranks))
            assert busiest <= done.duration <= busiest + 6 * stages
        remaining = [place for place in range(pipelines * stages) if place not in lost]
        for stage, used in enumerate(
            zip(*paths, strict=True)
        ):  # peers share the work of lost ranks
            counts = Counter(used)
            assert {*counts} == {n for n, p in enumerate(remaining) if p % stages == stage}
            assert max(counts.values()) - min(counts.values()) <= len(paths) // pipelines


def test_grids_without_a_rank_of_each_stage_are_refused():
    for wrong, ranks in (("2x2-1-3", 2), ("2x2", 3), ("2x3-1", 3), ("1x2-2", 3)):
        with pytest.raises(PipelineError, match="recycle: expected pipelines, stages and lost"):
            check(f"recycle:{wrong}", ranks, 4)
    with pytest.raises(ValueError, match="1f1b:2x2: expected one with a parameter for a value"):
        find("1f1b:2x2")
    with pytest.raises(ValueError, match="interleaved:2x2: expected one with a number"):
        find("interleaved:2x2")


@each(("pipelines", "each", "times"), [(2, 4, (15, 25)), (4, 4, (21, 21)), (8, 4, (21, 19))])
def test_the_more_pipelines_the_less_a_lost_rank_costs(pipelines, each, times):
    """Steps of 1F1B with all ranks and of those that remain; the table of docs/survival.md."""
    stages = 2 if pipelines == 2 else 4
    lost = f"recycle:{pipelines}x{stages}-{stages + 1}"
    done = check(lost, pipelines * stages - 1, pipelines * each)
    assert (check("1f1b", stages, each).duration, done.duration) == times


def halves_of_a_step(rank: int, ranks: int, micro_batches: int) -> Any:
    return [
        *map(forward, range(micro_batches * rank // ranks, micro_batches * (rank + 1) // ranks))
    ]


def test_ranks_of_stages_must_repeat_and_each_have_one():
    with pytest.raises(PipelineError, match="the ranks of stages do not repeat within 1024"):
        placement(lambda *step: [a._replace(stage=0) for a in halves_of_a_step(*step)], 2)
    with pytest.raises(PipelineError, match="or one of 2 ranks has no stage; let"):
        placement(
            lambda rank, ranks, number: [] if rank else [forward(m) for m in range(number)], 2
        )


@each("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_slowest_stage_determines_the_time(schedule):
    stages = [StageTime(1.0, 2.0), StageTime(2.0, 4.0)]
    done = carry_out(plan_of(schedule, 2, 100), lambda action: stages[action.stage])
    assert done.duration == max(done.ends) == pytest.approx(600, rel=0.02)


def test_messages_delay_the_stages_that_wait_for_them():
    fast, slow = (
        carry_out(plan_of("gpipe", 2, 1), lambda _: StageTime(1.0, 2.0, wire, wire)).duration  # noqa: B023
        for wire in (0.0, 0.5)
    )
    assert (fast, slow) == (6, 7)


Plan = list[list[Action]]


def moved(own: list[Action], action: Action, before: Action) -> None:
    own.remove(action)
    own.insert(own.index(before), action)


def deadlock(plan: Plan) -> None:
    """The last stage returns 1 before 0, and stage 1 needs 0 for 2."""
    plan[2] = [*map(forward, range(4)), *map(backward, range(4))]
    plan[1] = [forward(0), backward(0), *map(forward, (1, 2, 3)), *map(backward, (1, 2, 3))]


def whole_beside_halves(plan: Plan) -> None:
    plan[1].remove(backward_parameters(3, 1))
    plan[1][plan[1].index(backward_inputs(3, 1))] = backward(3, 1)


def other_stage(plan: Plan) -> None:
    plan[1][plan[1].index(backward_parameters(2, 2))] = backward_parameters(2, 1)


def left_out(plan: Plan) -> None:
    plan[:] = [[action for action in own if action.stage != 2] for own in plan]


def elsewhere(plan: Plan) -> None:
    even, odd = ([[a for a in own if a.micro_batch % 2 == m] for own in plan] for m in (0, 1))
    plan[2:] = [even[2] + odd[3], even[3] + odd[2]]


DX, DW = backward_inputs, backward_parameters
BROKEN: list[tuple[str, Callable[[Plan], Any], str]] = [
    ("1f1b", lambda plan: plan[1].remove(forward(2, 1)), "stage 1 lacks forward 2; add"),
    ("1f1b", lambda plan: plan[1].remove(backward(3, 1)), "stage 1 lacks backward 3; add"),
    ("1f1b", lambda plan: plan[1].append(backward(0, 1)), "stage 1 has backward 0 2 times"),
    ("1f1b", lambda plan: plan[1].append(forward(-1, 1)), "forward -1, but micro-batches are 0 to"),
    ("1f1b", deadlock, "deadlock: .*stage 1 waits in backward 0 for stage 2, stage 2 waits in"),
    ("zb_h1", lambda plan: plan[1].remove(DW(2, 1)), "stage 1 lacks backward_parameters 2; add"),
    (
        "zb_h1",
        lambda plan: moved(plan[1], DX(3, 1), forward(3, 1)),
        "stage 1 has backward_inputs 3 before forward 3; swap them",
    ),
    (
        "zb_h1",
        lambda plan: moved(plan[1], DW(3, 1), DX(3, 1)),
        "stage 1 has backward_parameters 3 before backward_inputs 3; swap them",
    ),
    ("zb_h1", whole_beside_halves, "stage 1 has backward 3 in one piece, and others in two"),
    ("zb_v", other_stage, "stage 1 has backward_parameters 2 2 times; keep one"),
    (
        "zb_v",
        lambda plan: plan[0].extend([forward(0, 1), backward(0, 1)]),
        "stage 1 is on rank 0 and on rank 1; keep the actions of one",
    ),
    ("zb_v", left_out, "no rank has stage 2, but one has 3; number stages from 0"),
    (
        "zb_v",
        lambda plan: moved(plan[1], forward(0, 2), plan[1][0]),
        "deadlock: .*stage 2 waits in forward 0 for stage 1; change",
    ),
    (
        "chimera",
        lambda plan: plan[3].extend([forward(0, 0), backward(0, 0)]),
        "stage 0 is on rank 0 and on rank 3; keep the actions of one",
    ),
    ("chimera", elsewhere, "stage 0 is on rank 0 and on rank .*, whose other stages differ"),
]


@each(("name", "change", "message"), BROKEN)
def test_the_checker_refuses_broken_plans(name, change, message):
    ranks = {"zb_v": 2, "chimera": 4}.get(name, 3)
    plan = [[*actions_of(name, rank, ranks, 4)] for rank in range(ranks)]
    assert check(plan).micro_batches == 4
    change(plan)
    with pytest.raises(PipelineError, match=message):
        check(plan)


def test_the_stages_of_each_rank_are_found_in_a_plan():
    for name, paths in (("zb_v", ((0, 1, 1, 0),)), ("chimera", ((0, 1), (1, 0)))):
        plan = [[*actions_of(name, rank, 2, 4)] for rank in range(2)]
        assert check(plan).owners.paths == paths


def test_a_name_that_is_given_to_another_schedule_is_that_of_the_latter(monkeypatch):
    first, second = PIPELINE_SCHEDULES["gpipe"], PIPELINE_SCHEDULES["1f1b"]
    for own in (first, second):
        monkeypatch.setitem(PIPELINE_SCHEDULES, "mine", own)
        assert actions_of("mine", 0, 2, 4) == actions_of(own, 0, 2, 4)
    assert actions_of(first, 0, 2, 4) != actions_of(second, 0, 2, 4)


@each("returned", [[], None, [("forward", 0)], [Action("update", 0)]])
def test_functions_that_return_something_else_are_refused(returned):
    words = "stage 0 lacks forward 0; add" if returned == [] else "lambda.*: .*actions"
    with pytest.raises((PipelineError, TypeError), match=words):
        check(lambda stage, stages, micro_batches: returned, 2, 2)
    with pytest.raises(ValueError, match="unknown pipeline schedule '1f1', did|did you mean"):
        find("1f1")


@each(
    ("name", "backward", "expected"),
    [
        ("gpipe", 2, ["stage 0  f0 f1          b0 b0 b1 b1", "stage 1     f0 f1 b0 b0 b1 b1"]),
        ("zb_h1", 2, ["stage 0  f0 f1    b0 w0 b1 w1", "stage 1     f0 b0 f1 b1 w0 w1"]),
        ("chimera", 1, ["stages 0, 1  f0  f1' b1' b0", "stages 0, 1  f1  f0' b0' b1"]),
    ],
)
def test_the_text_shows_when_each_stage_computes_what(name, backward, expected):
    lines = text(name, check(name, 2, 2, forward=1, backward=backward)).splitlines()
    assert lines[-2:] == expected
    halves = lines[1].endswith("b0: gradients of inputs, w0: of parameters")
    assert halves == (name == "zb_h1")
