"""Names that other programs use: replaced where they mean the same, otherwise answered."""

from __future__ import annotations

import re
import shlex

import pytest

from pydtnn.cli.config import TrainConfig, flags
from pydtnn.cli.parser import Arguments, parse
from pydtnn.utils.names import foreign_names
from tests.each import each

ALIASES = foreign_names()["option_aliases"]
ANSWERS = foreign_names()["options"]

USUAL = """
    --learning-rate --learning_rate --batch --bs -b --epoch -e --gpus --cuda --cpu --fp16 --amp
    --precision --workers -j --arch -a --data --dataset-dir --output --logdir --checkpoint
    --resume-from --pretrained --weights --optim --wd --nesterov --scheduler --warmup --nproc
    --world-size --np --deterministic --augmentation --val-split --eval --patience --run-name
    --debug --no-cuda --local_rank --dist-backend --compile --clip --accumulate --mixed-precision
    --print-freq --log-interval --list-models --list-datasets
"""

VALUES = {int: "3", float: "0.5", str: "some", dict: "{a: 1}"}


def known() -> dict[str, str]:
    """Name of the option of each flag."""
    return {own.label: name for name, own in flags(TrainConfig).items()}


@each("name", USUAL.split())
def test_every_usual_name_is_taken_or_answered(name):
    name = name.replace("_", "-")
    assert name in known() or name in ALIASES or name in ANSWERS


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
def test_an_answer_can_be_typed(name, form):
    with pytest.raises(ValueError, match=f"^train: there is no option {name}; ") as caught:
        parse(form.format(name=name).split())
    sentence = str(caught.value)
    assert "{" not in sentence
    if " omit it" in sentence:
        return
    advice = re.search(r"; use (.*?)(?: \(.*)?$", sentence)
    assert advice
    words = shlex.split(advice[1])
    if words[0] == "mpirun":
        assert words[:2] == ["mpirun", "-np"]
        assert words[2] == ("4" if form == "{name}" else "2")
        assert words[3:6] == ["python", "-m", "pydtnn.train"]
        words = words[6:]
    arguments = Arguments(words)
    if arguments.folder is None:
        arguments.configure()


def test_hyphens_and_underscores_are_the_same():
    assert parse(["--batch_size", "3"]) == TrainConfig(batch_size=3)
    assert parse(["--clip_norm=0.25"]) == parse(["--clip-norm=0.25"]) == TrainConfig(clip_norm=0.25)
    assert parse(["--model_options.some_name", "a_b"]).model_options == {"some_name": "a_b"}
    assert parse(["--output_dir=a_b"]).output_dir == "a_b"


def test_names_of_models_and_data_sets_are_listed():
    for name, words in (("--list-models", "resnet44"), ("--list-datasets", "cifar100")):
        with pytest.raises(ValueError, match=words):
            parse([name])
