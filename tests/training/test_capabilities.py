"""The table of what features need and exclude: names, the page that shows it, refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pydtnn.cli.config import TrainConfig, flags
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.training.capabilities import FEATURES, why_not
from tests import combinations
from tests.each import each
from tests.small_training import small_trainer
from tests.test_imports import ROOT

NEEDS = {option: text for own in flags(TrainConfig).values() for option, text in own.needs.items()}
EXCLUDES = {own.label: own.excludes for own in flags(TrainConfig).values() if own.excludes}

RULES = [
    (name, other, why, needed)
    for name, feature in FEATURES.items()
    for needed, others in ((True, feature.needs), (False, feature.excludes))
    for other, why in others.items()
]


OF_SCHEMES = [
    (name, other, why)
    for name, scheme in SCHEMES.items()
    for other, why in getattr(scheme, "excludes", {}).items()
]


def named(name: str) -> str:
    """A feature with the options that choose it."""
    options = FEATURES[name].options
    return f"{name} ({coded(options)})" if options else name


def coded(options: str) -> str:
    return " or ".join(f"`{option}`" for option in options.split(" or "))


def tables() -> list[str]:
    """The lines of the tables in the manual, with an empty one between them."""
    features = [
        f"| {named(name)} | {'requires ' * needed}{named(other)} | {why.format('...', '...')} |"
        for name, other, why, needed in RULES
    ]
    features += [
        f"| `--scheme {name}` | {named(other)} | {why.format('...')} |"
        for name, other, why in OF_SCHEMES
    ]
    options = [
        f"| {coded(name)} | requires {coded(other)} | {why} |"
        for name, text in NEEDS.items()
        for other, _, why in [text.partition("; ")]
    ]
    options += [
        f"| {coded(name)} | {coded(other)} | {why} |"
        for name, others in EXCLUDES.items()
        for other, why in others.items()
    ]
    heading = ["| | cannot be combined with | |", "|---|---|---|"]
    return [*heading, *features, "", *heading, *options]


@pytest.mark.tools
def test_the_manual_shows_the_tables():
    page = (ROOT / "docs" / "running.md").read_text()
    for text in "\n".join(tables()).split("\n\n"):
        assert text in page, text


def test_features_and_options_of_the_tables_exist():
    assert {row[1] for row in (*RULES, *OF_SCHEMES)} <= FEATURES.keys()
    of_features = [feature.options for feature in FEATURES.values()]
    excluded = [name for others in EXCLUDES.values() for name in others]
    labels = {own.label for own in flags(TrainConfig).values() if not own.owner}
    for text in [*of_features, *NEEDS, *NEEDS.values(), *EXCLUDES, *excluded]:
        assert {*re.findall(r"--[a-z0-9-]+", text)} <= labels


def chosen(options: str) -> dict[str, Any]:
    """Values of a configuration that has one of the alternatives, and what they need."""
    values: dict[str, Any] = {}
    for option in options.split(" or ")[0][2:].split(" --"):
        label, _, value = option.partition(" ")
        own = flags(TrainConfig)[label.replace("-", "_")]
        if member := own.members.get(value.partition("=")[0]):
            own, value = member, value.partition("=")[2]
        usual = {int: 7, float: 0.5, str: "3", dict: {"a": 1}, bool: True}[own.kind]
        special = {"parallel": "pipeline=2", "checkpoint_every": "7 steps"}
        value = value if value[:1] not in ("", "!") else special.get(own.name, usual)
        values |= {own.name: own.kind(value)}
        if own.label in NEEDS:
            values = chosen(NEEDS[own.label].partition("; ")[0]) | values
    return values


@each(
    ("name", "other"), [r[:2] for r in RULES if FEATURES[r[0]].options and FEATURES[r[1]].options]
)
def test_the_command_line_refuses_what_a_trainer_refuses(name, other):
    first, second = chosen(FEATURES[name].options), chosen(FEATURES[other].options)
    if other in FEATURES[name].needs:
        second = {}
    else:
        TrainConfig(**first)
    with pytest.raises(ValueError, match="^train: --.* (requires|cannot be combined with) --"):
        TrainConfig(**first | second)


@each(("name", "other"), [(name, other) for name, others in EXCLUDES.items() for other in others])
def test_options_that_exclude_each_other_are_refused_together_only(name, other):
    first, second = chosen(name), chosen(other)
    for alone in (first, second):
        TrainConfig(**alone)
    with pytest.raises(ValueError, match="^train: --.* cannot be combined with --"):
        TrainConfig(**first | second)


STAGES = {"data": 2, "pipeline": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axes": STAGES, "pipeline_schedule": "chimera", "compress": "top_k"}, "1f1b"),
        ({"axes": {"data": 2}, "scheme": "diloco", "compress": "int8"}, "do not sum gradients"),
        ({"axes": {"data": 2}, "micro_batches": 2}, "requires a model that is cut"),
        ({"axes": {}, "exact": True, "tuning": "fixed", "compress": "sign"}, "as they are; omit"),
        ({"axes": {"data": 2}, "scheme": "one_bit_adam"}, "expected AdamW"),
        ({"axes": {"data": 2}, "scheme": "local_sgd", "optimizer": "schedule_free"}, "average"),
        ({"axes": STAGES, "exact": True, "tuning": "fixed"}, ""),
        ({"axes": {"data": 2}, "scheme": "sharded", "compress": "bfloat16"}, ""),
    ],
    ids=str,
)
def test_trainer_command_line_and_oracle_answer_as_the_table_does(options, words, tmp_path):
    why = combinations.judge(options, tmp_path / "run")
    assert words in why
    assert bool(words) == bool(why)


@each("seed", [*range(3)])
def test_all_answer_alike_for_random_combinations(seed, tmp_path):
    options = combinations.draw(np.random.default_rng([2611, seed]))
    combinations.judge(options, tmp_path / str(seed))


def test_the_first_reason_against_a_feature_is_the_answer():
    setup = small_trainer().setup
    assert why_not("survival", setup) == ""
    assert why_not("micro_batches", setup).startswith("micro_batches=True requires a model")
