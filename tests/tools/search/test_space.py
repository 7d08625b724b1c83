"""What a search varies, and files that describe it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pydtnn.tools.search import Space, make_space, read_space
from pydtnn.tools.search.dimension import MAX_GRID
from pydtnn.tools.search.space import argument
from pydtnn.tools.search.training import TrainingObjective, configuration
from pydtnn.utils import plain_yaml
from tests.each import each

optuna = pytest.importorskip("optuna")

EXAMPLE = """
fixed: {model: resnet20, epochs: 10}
space:
  lr: {low: 1e-3, high: 1.0, log: true}
  batch_size: [32, 64]
  optimizer: [sgd, adamw]
  momentum: {low: 0.5, high: 0.99, if: {optimizer: sgd}}
objective: {maximize: val_accuracy}
sampler: {name: tpe, n_startup_trials: 4}
pruner: asha
trials: 64
stop: {val_accuracy: 0.85, after: 2h}
"""


def test_a_file_is_a_space(tmp_path):
    (tmp_path / "space.yaml").write_text(EXAMPLE)
    space = read_space(tmp_path / "space.yaml")
    assert [one.name for one in space.dimensions] == ["lr", "batch_size", "optimizer", "momentum"]
    assert space.dimensions[0].ends == (1e-3, 1.0)
    assert space.dimensions[3].condition == {"optimizer": ("sgd",)}
    assert space.objective == {"val_accuracy": "maximize"}
    assert (space.trials, space.stop, space.after) == (64, {"val_accuracy": 0.85}, 7200.0)
    assert space.sampler == {"name": "tpe", "n_startup_trials": 4}


def test_a_json_file_of_lists_is_a_grid(tmp_path):
    text = '{"optimizer": ["Adam", "SGD"], "num_epochs": [20, 50], "batch_size": [32, 64]}'
    (tmp_path / "space.json").write_text(text)
    space = read_space(tmp_path / "space.json")
    assert space.sampler == {"name": "grid"}
    assert space.trials == 8
    assert space.grid()[1] == {"optimizer": "Adam", "num_epochs": 20, "batch_size": 64}
    arguments = TrainingObjective(space, threads=1).arguments(space.grid()[1])
    trial = optuna.trial.create_trial(value=0.5, user_attrs={"arguments": arguments})
    options = plain_yaml.load(configuration(space, trial))
    assert options == options | {"optimizer": "Adam", "epochs": 20, "batch_size": 64}


def test_the_best_values_of_a_function_are_those_of_the_space():
    space = make_space({"x": [[1, 2], [3]], "y": [True, None]}, function="f.py:f")
    names = {
        one.name: optuna.distributions.CategoricalDistribution([*one.names])
        for one in space.dimensions
    }
    params = space.stored({"x": [3], "y": None})
    trial = optuna.trial.create_trial(value=0.5, params=params, distributions=names)
    assert plain_yaml.load(configuration(space, trial)) == {"x": [3], "y": None}


@each(
    ("given", "values"),
    [
        ({"low": 1, "high": 4}, [1, 2, 3, 4]),
        ({"low": 0.1, "high": 0.4, "step": 0.1}, pytest.approx([0.1, 0.2, 0.3, 0.4])),
    ],
)
def test_a_range_with_steps_is_part_of_a_grid(given, values):
    (own,) = make_space({"x": given}, sampler="grid").dimensions
    assert own.values() == values


def test_suggestions_are_in_their_ranges_and_conditions_hold():
    space = make_space(
        {
            "lr": {"low": 1e-3, "high": 1.0, "log": True},
            "width": {"low": 1, "high": 9, "step": 2},
            "kind": ["a", {"b": 1}],
            "only": {"low": 0.0, "high": 1.0, "if": {"kind": "a"}},
        }
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    found = [space.suggest(study.ask()) for _ in range(50)]
    assert all(1e-3 <= one["lr"] <= 1.0 for one in found)
    assert {one["width"] for one in found} == {1, 3, 5, 7, 9}
    assert all(("only" in one) == (one["kind"] == "a") for one in found)
    assert {"b": 1} in [one["kind"] for one in found]


@each(
    ("entries", "message"),
    [
        ({"space": {}}, "space must be a mapping"),
        ({"space": {"lr": 0.1}}, "lr must be a list of values or a range"),
        ({"space": {"lr": [0.1, 0.1]}}, "lr has a value twice"),
        ({"space": {"lr": {"low": 1, "high": 0.1}}}, "low must be below high"),
        ({"space": {"lr": {"low": 0, "high": 1, "log": True}}}, "low must be positive"),
        ({"space": {"lr": {"choices": [1], "low": 0}}}, "lr has values and a range"),
        ({"space": {"x": [1], "y": {"choices": [1], "if": {"z": 1}}}}, "before this one"),
        ({"space": {"x": [1]}, "fixed": {"x": 1}}, "x is in space and in fixed"),
        ({"space": {"x": [1]}, "objective": {"maximise": "y"}}, "unknown direction"),
        ({"space": {"x": [1]}, "trials": True}, "trials must be an integer from 1"),
        ({"space": {"x": [1]}, "stop": {"y": 5}}, "unknown value 'y'"),
        ({"space": {"x": {"low": 0.0, "high": 1.0}}, "sampler": "grid"}, "a grid requires values"),
        (
            {"space": {"x": [1]}, "objective": {"maximize": ["a", "b"]}, "pruner": "asha"},
            "several objectives cannot be pruned",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(entries, message):
    with pytest.raises(ValueError, match=message) as found:
        make_space(**entries)
    assert "\n" not in str(found.value)


def test_a_grid_of_millions_is_refused_before_it_is_made():
    wide = {"low": 0, "high": MAX_GRID - 1}
    with pytest.raises(ValueError, match="more than 100,000 trials; use sampler: random"):
        make_space({"x": wide, "y": wide, "z": wide}, sampler="grid")
    with pytest.raises(ValueError, match="use a larger step"):
        make_space({"x": {"low": 0, "high": 1e300, "step": 1}}, sampler="grid")
    assert make_space({"x": wide}, sampler="grid").trials == MAX_GRID


@each("text", ["[1, 2]", "{a: [", "\xff", "spaces: {lr: [1]}"])
def test_a_file_that_is_no_space_is_refused(text, tmp_path):
    (tmp_path / "space.yaml").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match="^search: "):
        read_space(tmp_path / "space.yaml")


@each(
    ("name", "value", "expected"),
    [
        ("lr", 0.1, "--lr=0.1"),
        ("exact", True, "--exact"),
        ("clip_norm", None, "--clip-norm=null"),
        ("model_options.bias", True, "--model-options.bias=true"),
        ("schedule_options", {"a": 1}, "--schedule-options={a: 1}"),
    ],
)
def test_a_value_is_an_argument_of_training(name, value, expected):
    assert argument(name, value) == expected


def test_checks_are_trials_that_a_sampler_can_choose_with_every_choice_and_both_ends():
    space = make_space(
        {
            "optimizer": ["sgd", "adamw", "lion"],
            "momentum": {"low": 0.5, "high": 0.9, "if": {"optimizer": "sgd"}},
            "schedule": {"choices": ["step", "cosine"], "if": {"optimizer": ["adamw", "lion"]}},
            "factor": {"low": 0.1, "high": 0.5, "if": {"schedule": "step"}},
            "lr": {"low": 0.1, "high": 1.0},
        }
    )
    found = [*space.checks()]
    for values in found:
        assert [*values] == [d.name for d in space.dimensions if d.applies(values)]
    for name, values in (("factor", {0.1, 0.5}), ("momentum", {0.5, 0.9}), ("lr", {0.1, 1.0})):
        assert {one[name] for one in found if name in one} == values
    assert {one["optimizer"] for one in found} == {"sgd", "adamw", "lion"}


def test_only_what_decides_trials_is_the_identity_of_a_space():
    def of(**options: Any) -> str:
        return make_space({"x": [1, 2]}, **options).identity()

    assert of() == of(trials=5) == of(stop={"after": "1h"})
    assert len({of(), of(seed=1), of(sampler="random"), of(fixed={"y": 1})}) == 4
    assert math.isinf(Space(()).after)
