"""Population-based training: its rules, and what it gains on a problem with a known schedule."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pydtnn.tools.search import make_space, run
from pydtnn.tools.search.population import FACTORS, Population, exploit, explore
from pydtnn.tools.search.study import PARENT, Later, SharedStudy
from pydtnn.utils.errors import AgreedError
from tests.tools.search.test_search import FIXED

pytest.importorskip("optuna")

PBT = {"name": "pbt", "population": 4, "generations": 3}
RANGES = {"x": {"low": 0.1, "high": 10.0, "log": True}, "n": {"low": 1, "high": 9}, "c": [1, 2]}


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_worst_continue_from_one_of_the_best():
    costs = [float(cost) for cost in generator(1).permutation(10)]
    ranked = [int(one) for one in np.argsort(costs)]
    for own in range(10):
        parents = {exploit(costs, own, 0.2, generator(seed)) for seed in range(40)}
        assert parents == ({*ranked[:2]} if own in ranked[-2:] else {own})


def test_members_that_have_failed_are_replaced():
    costs = [None, 1.0, None, 3.0]
    assert [exploit(costs, own, 0.25, generator()) for own in range(4)] == [1, 1, 1, 3]
    assert [exploit(costs, own, 0.0, generator()) for own in range(4)] == [1, 1, 1, 3]
    assert exploit([None, None], 0, 0.2, generator()) is None


def test_options_are_perturbed_within_their_ranges_or_drawn_anew():
    space = make_space(RANGES)
    values = {"x": 1.0, "n": 5, "c": 2}
    near = [explore(space.dimensions, values, 0.0, generator(seed)) for seed in range(200)]
    assert {one["x"] for one in near} == {*FACTORS}
    assert {one["n"] for one in near} == {4, 6}
    assert {one["c"] for one in near} == {2}
    shares = Counter(one["x"] for one in near)
    assert all(0.35 < count / 200 < 0.65 for count in shares.values())
    anew = [explore(space.dimensions, values, 1.0, generator(seed)) for seed in range(200)]
    assert all(0.1 <= float(one["x"] or 0) <= 10.0 for one in anew)
    assert len({one["x"] for one in anew}) == 200
    assert {one["n"] for one in anew} == {*range(1, 10)}
    edge = explore(space.dimensions, {**values, "x": 9.9}, 0.0, generator(1))
    assert edge["x"] in (10.0, 9.9 * 0.8)


def test_options_of_another_choice_are_drawn():
    space = make_space({"o": ["a", "b"], "m": {"low": 0.5, "high": 0.9, "if": {"o": "a"}}})
    found = [explore(space.dimensions, {"o": "b"}, 0.5, generator(seed)) for seed in range(40)]
    assert all(("m" in one) == (one["o"] == "a") for one in found)
    assert {one["o"] for one in found} == {"a", "b"}


def take(own: SharedStudy) -> Any:
    return own.take({"host": "here", "job": 1, "ranks": [0]})


def test_a_generation_begins_when_the_one_before_has_ended(tmp_path):
    space = make_space({"x": {"low": 0.0, "high": 1.0}}, objective={"minimize": "y"}, sampler=PBT)
    assert space.trials == 12
    assert [Population(3, 4).part(number) for number in (0, 2, 3, 11)] == [0.25, 0.25, 0.5, 1.0]
    assert [[*Population(3, 4).before(number)] for number in (2, 8)] == [[], [3, 4, 5]]
    own = SharedStudy(tmp_path, space)
    first = [take(own) for _ in range(4)]
    assert [one.part for one in first] == [1 / 3] * 4
    with pytest.raises(Later):
        take(own)
    for one in first[1:]:
        own.tell(one.number, {"y": float(one.number)}, {})
    with pytest.raises(Later):
        take(own)
    own.fail(0, "of the test")
    second = [take(own) for _ in range(4)]
    assert [one.number for one in second] == [4, 5, 6, 7]
    assert [one.parent for one in second] == [1, 1, 2, 3]
    assert second[1].values == first[1].values
    assert second[0].values != first[1].values


SPACE: dict[str, Any] = {
    "fixed": {**FIXED, "epochs": 3},
    "space": {"lr": {"low": 1e-3, "high": 0.3, "log": True}, "momentum": [0.5, 0.9]},
    "sampler": PBT,
}


def outcome(study: Any) -> list[Any]:
    return [(one.params, one.values, one.user_attrs.get(PARENT)) for one in study.trials]


def test_members_continue_from_checkpoints_also_if_interrupted(tmp_path):
    space = make_space(**SPACE)
    study = run(None, space, tmp_path / "whole", show=None)
    assert len(study.trials) == 12
    for one in study.trials:
        folder = tmp_path / "whole" / f"trial-{one.number:05d}"
        history = json.loads((folder / "history.json").read_text())
        generation = one.number // 4
        assert len(history) == generation + 1
        assert one.values == [history[-1]["val_accuracy"]]
        if generation:
            before = tmp_path / "whole" / f"trial-{one.user_attrs[PARENT]:05d}"
            assert history[:-1] == json.loads((before / "history.json").read_text())
    parts = tmp_path / "parts"
    for trials in (3, 7, 12):
        own = SharedStudy(parts, space)
        assert take(own) is not None  # begun by a process that is killed
        own.close()
        run(None, make_space(**SPACE, trials=trials), parts, show=None)
    assert outcome(SharedStudy(parts, space).study) == outcome(study)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": {**PBT, "population": 1}}, "population must be at least 2, got 1"),
        ({"sampler": {**PBT, "quantil": 1}}, "sampler pbt: .*quantil"),
        ({"pruner": "asha"}, "a population requires one objective and no pruner"),
        ({"sampler": {**PBT, "generations": 4}}, "4 generations need as many epochs, got 3"),
    ],
)
def test_what_is_wrong_is_refused(change, message, tmp_path):
    with pytest.raises((ValueError, AgreedError), match=message):
        run(None, make_space(**(SPACE | change)), tmp_path / "study", show=None)
    assert not (tmp_path / "study").exists()
