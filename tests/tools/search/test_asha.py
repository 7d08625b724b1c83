"""Trials that are paused at rungs, and of which the best continue."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.tools.search import Trial, make_space, run
from pydtnn.tools.search.asha import Halving
from pydtnn.tools.search.study import GROUP, Later, SharedStudy, Taken
from pydtnn.train import main
from tests.each import each
from tests.tools.search.test_search import FIXED, SPACE

pytest.importorskip("optuna")

RANGE = {"x": {"low": 0.0, "high": 1.0}}
EPOCHS = 18


def shared(folder: Path, trials: int = 12, **options: Any) -> SharedStudy:
    common: dict[str, Any] = {"objective": {"minimize": "y"}, "pruner": "asha"}
    return SharedStudy(folder, make_space(RANGE, trials=trials, **(common | options)))


def group(rank: int = 0) -> dict[str, Any]:
    return {"host": "here", "job": 1, "ranks": [rank]}


def value(taken: Taken, epoch: int) -> float:
    """Return the value of an epoch, of which the order of trials depends on the epoch, too."""
    x = taken.values["x"]
    return float((x - 0.3) ** 2 + 0.1 * np.sin(50 * x) / epoch)


def begun(own: SharedStudy, size: int = 1) -> Taken:
    """The next trial of a group of so many ranks."""
    taken = own.take({**group(), "ranks": [*range(size)]})
    assert taken is not None
    return taken


def train(own: SharedStudy, taken: Taken, first: int = 1, last: int = EPOCHS) -> int | None:
    """Train to the end or a pause, and store it; return the last epoch, None after `last`."""
    for epoch in range(first, last + 1):
        pauses = own.report(taken.number, value(taken, epoch), epoch)
        if epoch == EPOCHS:
            own.tell(taken.number, {"y": value(taken, epoch)}, {})
        elif pauses:
            own.prune(taken.number, {})
        if epoch == EPOCHS or pauses:
            return epoch
    return None


def search(own: SharedStudy) -> list[tuple[int, int | None]]:
    """Train all trials; return them in the order in which they began or continued."""
    order = []
    while (taken := own.take(group())) is not None:
        order.append((taken.number, train(own, taken)))
    return order


def states(own: SharedStudy) -> Counter[str]:
    return Counter(one.state.name for one in own.study.trials)


@each("direction", ["minimize", "maximize"])
def test_one_of_three_trials_of_each_rung_continues(direction, tmp_path):
    own = shared(tmp_path, 27, objective={direction: "y"}, sampler="random")
    search(own)
    reached = Counter(max(one.intermediate_values, default=0) for one in own.study.trials)
    assert {*reached} == {3, 9, 18}
    assert 3 <= reached[18] <= 5  # some of the last trials are better than those that continued
    assert 9 <= reached[9] + reached[18] <= 12
    assert states(own) == {"COMPLETE": reached[18], "PRUNED": 27 - reached[18]}
    assert_best_thirds_continue(own, -1 if direction == "maximize" else 1)


def assert_best_thirds_continue(own: SharedStudy, sign: int = 1) -> None:
    for rung in (3, 9):
        there = [one for one in own.study.trials if rung in one.intermediate_values]
        there.sort(key=lambda one: (sign * one.intermediate_values[rung], one.number))
        assert all(max(one.intermediate_values) > rung for one in there[: len(there) // 3])


def test_a_third_continues_and_values_that_are_no_numbers_are_the_worst():
    halving = Halving(1, 3)
    assert halving.ranked({0: {1: math.nan}, 1: {1: 2.0}, 2: {2: 1.0}}) == [
        *((2, True), (1, False), (0, False))
    ]
    costs: dict[int, dict[int, float]] = {}
    continued = []
    for number in range(30):  # each is the best so far
        costs[number] = {1: 1 / (1 + number)}
        for one in [one for one, good in halving.ranked(costs) if good and 3 not in costs[one]]:
            costs[one][3] = costs[one][1]
            continued.append(one)
    assert continued == [*range(2, 30, 3)]


def test_trials_continue_as_soon_as_they_are_among_the_best(tmp_path):
    own, order = shared(tmp_path, 5), []
    while (taken := own.take(group())) is not None:
        y = (0.2, 0.1, 0.3, 0.4, 0.05)[taken.number]
        epoch = max(own.study.trials[taken.number].intermediate_values, default=0) + 1
        while epoch < EPOCHS and not own.report(taken.number, y, epoch):
            epoch += 1
        order.append((taken.number, epoch))
        if epoch == EPOCHS:
            own.tell(taken.number, {"y": y}, {})
        else:
            own.prune(taken.number, {})
    # The last one is the best when it reaches the first rung, and at the end nothing is complete.
    assert order == [(0, 3), (1, 3), (2, 3), (1, 9), (3, 3), (4, 9), (4, 18)]


def test_a_trial_that_would_be_the_next_is_not_paused(tmp_path):
    own = shared(tmp_path, 4)
    values = [0.3, 0.2, 0.1]
    for number, y in enumerate(values):
        begun(own)
        assert [own.report(number, y, epoch) for epoch in (1, 2, 3)][:2] == [False, False]
        if number < 2:
            own.prune(number, {})
    assert not own.report(2, 0.1, 4)
    assert len(own.study.trials[2].user_attrs[GROUP]) == 1
    assert [own.report(2, 0.1, epoch) for epoch in range(5, 10)] == [False] * 4 + [True]


def test_a_trial_that_fails_makes_room_for_another_of_the_same_rung(tmp_path):
    own = shared(tmp_path, 4)
    order = []
    for cost in (0.1, 0.2, 0.3, None, 0.4, None, None):
        taken = begun(own)
        order.append(taken.number)
        if cost is None:
            own.fail(taken.number, "out of luck")
        else:
            own.report(taken.number, cost, 3)
            own.prune(taken.number, {})
    assert order == [0, 1, 2, 0, 3, 1, 2]


def test_a_paused_trial_continues_on_a_group_of_its_size(tmp_path):
    options: dict[str, Any] = {"objective": {"minimize": "y"}, "sampler": "random", "trials": 4}
    space = make_space({"ranks_per_trial": [1, 2], **RANGE}, pruner="asha", **options)
    own = SharedStudy(tmp_path, space)
    found = []
    for size, cost in ((1, 0.9), (1, 0.8), (1, 0.7), (2, 0.1), (1, None), (2, None)):
        taken = begun(own, size)
        found.append((taken.number, taken.values["ranks_per_trial"]))
        if cost is not None:
            own.report(taken.number, cost, 3)
            own.prune(taken.number, {})
    assert found == [(0, 1), (1, 1), (2, 1), (3, 2), (2, 1), (3, 2)]


def test_a_search_without_further_time_has_a_trial_that_is_complete(tmp_path):
    own = shared(tmp_path)
    for _ in range(4):
        train(own, begun(own))
    own.close()
    late = shared(tmp_path, stop={"after": "1 ns"})
    search(late)
    assert states(late)["COMPLETE"] == 1
    assert states(late)["RUNNING"] == 0
    assert len(late.study.trials) == 4


def test_an_interrupted_search_has_the_same_trials(tmp_path):
    generator = random.Random(3)
    whole = shared(tmp_path / "whole")
    search(whole)
    turns = 0
    while True:
        own = shared(tmp_path / "parts")
        taken = own.take(group())
        if taken is None:
            break
        turns += 1
        known = max(own.study.trials[taken.number].intermediate_values, default=0)
        again = generator.choice((1, max(1, known)))  # without and with a checkpoint
        train(own, taken, again, min(generator.randrange(known, known + 4), EPOCHS))
        own.close()
    assert turns > 20
    assert [(o.params, o.values, o.state, o.intermediate_values) for o in own.study.trials] == [
        (o.params, o.values, o.state, o.intermediate_values) for o in whole.study.trials
    ]


def trained(folder: Path, groups: int, kills: int) -> Counter[tuple[int, int]]:
    """How often each epoch was trained by groups that take turns, of which some are killed."""
    generator, counts = random.Random(groups), Counter[tuple[int, int]]()
    studies = {number: shared(folder, 20) for number in range(groups)}
    at: dict[int, tuple[Taken, int]] = {}
    while studies:
        one = generator.choice([*studies])
        own = studies[one]
        if kills and generator.random() < 0.05:
            kills -= 1
            own.close()
            at.pop(one, None)
            studies[one] = shared(folder, 20)
            continue
        if one not in at:
            try:
                taken = own.take(group(one))
            except Later:
                assert groups > 2  # with two, there always is another trial
                continue
            if taken is None:
                studies.pop(one).close()
                continue
            at[one] = taken, max(own.study.trials[taken.number].intermediate_values, default=0)
        taken, epoch = at[one]
        counts[taken.number, epoch + 1] += 1
        at[one] = taken, epoch + 1
        if train(own, taken, epoch + 1, epoch + 1) is not None:
            del at[one]
    return counts


@each(("groups", "kills"), [(2, 0), (4, 12)])
def test_no_trial_is_lost_or_counted_twice_by_groups_that_may_be_killed(groups, kills, tmp_path):
    """Groups without a promoted trial continue others until the end."""
    counts = trained(tmp_path, groups, kills)
    own = shared(tmp_path, 20)
    trials = own.study.trials
    assert states(own)["FAIL"] == states(own)["RUNNING"] == 0
    assert [one.number for one in trials] == [*range(20)]
    assert states(own)["COMPLETE"] >= 2
    for one in trials:
        assert sorted(one.intermediate_values) == [*range(1, len(one.intermediate_values) + 1)]
    if kills:
        return
    assert set(counts.values()) == {1}  # no epoch twice
    assert any(span["until"] is None for one in trials for span in one.user_attrs[GROUP])
    assert_best_thirds_continue(own)


def test_a_group_waits_if_no_trial_is_paused(tmp_path):
    one, two = shared(tmp_path, 1), shared(tmp_path, 1)
    taken = begun(one)
    with pytest.raises(Later):
        two.take(group(1))
    train(one, taken)
    assert begun(two).number == 0


def test_a_paused_trial_continues_from_its_checkpoint(tmp_path):
    """Its results are those of a run without a pause."""
    pruner = {"name": "asha", "min_resource": 1, "reduction_factor": 2}
    space = make_space(**SPACE | {"fixed": FIXED | {"epochs": 4}, "trials": 3}, pruner=pruner)
    study = run(None, space, tmp_path / "study", show=None)
    assert {one.state.name for one in study.trials} == {"COMPLETE", "PRUNED"}
    paused = [one for one in study.trials if len(one.user_attrs[GROUP]) > 1]
    for one in paused:
        folder = tmp_path / str(one.number)
        own = [f"--output-dir={folder}", "--threads=1", "--quiet"]
        assert main([*one.user_attrs["arguments"], *own]) == 0
        history = json.loads((folder / "history.json").read_text())
        values = [logs["val_accuracy"] for logs in history]
        assert [*one.intermediate_values.values()] == values[: len(one.intermediate_values)]
    assert any(one.state.name == "COMPLETE" for one in paused)


def test_a_function_is_called_again_for_each_part(tmp_path):
    calls: Counter[int] = Counter()

    def objective(trial: Trial) -> float:
        calls[trial.number] += 1
        assert trial.resumed is (calls[trial.number] > 1)
        for epoch in range(1, EPOCHS + 1):
            if trial.report(trial.values["x"] / epoch, epoch, last=epoch == EPOCHS):
                break
        return float(trial.values["x"] / epoch)

    options: dict[str, Any] = {"objective": {"minimize": "y"}, "pruner": "asha", "trials": 9}
    lines: list[str] = []
    study = run(objective, RANGE, tmp_path, show=lines.append, **options)
    for one in study.trials:
        spans = one.user_attrs[GROUP]
        assert calls[one.number] == len(spans)
    assert max(calls.values()) > 1
    complete = [one for one in study.trials if one.state.name == "COMPLETE"]
    assert [one.value for one in complete] == [one.params["x"] / EPOCHS for one in complete]
    assert any("  paused after epoch 3, y " in line for line in lines)
