"""Recipes are files of options in the package."""

from dataclasses import replace

import pytest

from pydtnn.__main__ import main
from pydtnn.cli.parser import Arguments, parse, recipe_file, recipe_names
from pydtnn.cli.parts import find
from tests.each import each


@each("name", recipe_names())
def test_a_recipe_is_a_file_of_options_which_the_command_line_overrides(name):
    config = parse(["--recipe", name])
    assert config == parse(["--config", str(recipe_file(name))])
    assert parse(["--epochs=99", "--recipe", name]) == replace(config, epochs=99)
    for part in ("model", "dataset", "optimizer", "schedule"):
        found, options = find(config, part)
        assert {*options} <= {*found.takes}


def test_another_name_drops_the_options_of_the_one_before(tmp_path):
    def options(*arguments):
        return parse(["--recipe=mnist-99", *arguments]).model_options

    assert options("--model=whitened_cnn:kernel=3") == options() | {"kernel": 3}
    assert options("--model=cnn") == {}
    assert options("--model-options.shortcut=A", "--model=resnet20") == {"shortcut": "A"}
    (tmp_path / "own.yaml").write_text("model_options: {shortcut: A}\nmodel: resnet20\n")
    assert options(f"--config={tmp_path}/own.yaml") == {"shortcut": "A"}
    resumed = {"model": "whitened_cnn", "model_options": {"kernel": 3}}
    assert Arguments(["--model=cnn"]).configure(resumed).model_options == {}
    assert parse(["--load=a:partial=true", "--load=b"]).load_options == {"partial": True}


@pytest.mark.tools
def test_recipes_are_listed_with_what_to_expect_and_printed(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    for name in recipe_names():
        assert f"{name} " in listed
        assert main(["recipes", name]) == 0
        assert capsys.readouterr().out == recipe_file(name).read_text()
    assert main(["recipes", "mnist"]) == 1
    assert "did you mean" in capsys.readouterr().err


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="^train: unknown recipe 'mnist-98'; did you mean"):
        parse(["--recipe=mnist-98"])
