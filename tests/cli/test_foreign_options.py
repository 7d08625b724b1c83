"""Names that other programs use: replaced where they mean the same, otherwise answered."""

from __future__ import annotations

import re

import pytest

from pydtnn.cli.config import TrainConfig, flags
from pydtnn.cli.parser import Arguments, parse
from pydtnn.utils.names import foreign_names
from tests.each import each

TABLES = foreign_names()
ALIASES = {n.replace("_", "-"): ours for n, ours in TABLES["aliases"].items() if n[0] == "_"}
ANSWERS = {name.replace("_", "-"): answer for name, answer in TABLES["options"].items()}

VALUES = {int: "3", float: "0.5", str: "some", dict: "{a: 1}"}


def known() -> dict[str, str]:
    """Name of the option of each flag."""
    return {own.spelling: name for name, own in flags(TrainConfig).items()}


def test_no_name_of_ours_is_replaced_or_refused_and_those_in_explanations_exist():
    assert not {*known()} & {*ALIASES, *ANSWERS}
    assert not {*ALIASES} & {*ANSWERS}
    for answer in ANSWERS.values():
        assert {*re.findall(r"--[a-z][a-z-]+", answer)} <= {*known()}


@each("alias", ALIASES)
def test_an_alias_is_the_same_as_its_option(alias):
    name = known()[ALIASES[alias]]
    own = flags(TrainConfig)[name]
    value = [] if own.kind is bool else [own.choices[0] if own.choices else VALUES[own.kind]]
    if name == "resume":
        assert Arguments([alias, "folder"]).folder == "folder"
        return
    partners = ["--load=file"] if name == "evaluate_only" else []
    config = parse([alias, *value, *partners])
    assert config == parse([ALIASES[alias], *value, *partners])
    assert config != TrainConfig()
    if value and alias.startswith("--"):
        assert parse([f"{alias}={value[0]}"]) == config


@each("name", ANSWERS)
@each("form", ["{name}", "{name}=2", "{name} 2"])
def test_an_option_of_another_program_is_answered(name, form):
    with pytest.raises(ValueError, match=f"^train: there is no option {name}; (use|omit) "):
        parse(form.format(name=name).split())


def test_hyphens_and_underscores_are_the_same():
    assert parse(["--batch_size", "3"]) == TrainConfig(batch_size=3)
    assert parse(["--clip_norm=0.25"]) == parse(["--clip-norm=0.25"]) == TrainConfig(clip_norm=0.25)
    assert parse(["--model_options.some_name", "a_b"]).model_options == {"some_name": "a_b"}
    assert parse(["--output_dir=a_b"]).output_dir == "a_b"
