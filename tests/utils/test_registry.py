"""Things by name: one way from what is given to what is meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pydtnn.utils.registry import Registry
from tests.each import each


class Shape:
    pass


class Box(Shape):
    def __init__(self, size: int, colour: str = "red") -> None:
        self.given = size, colour


class Lid(Box):
    def __init__(self, hinge: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.hinge = hinge


def shapes(base: Any = Shape, **registry: Callable[..., Any]) -> Registry[Any]:
    aliases = {"carton": "big_box"}
    return Registry("shape", {"big_box": Box} | registry, base, "a Shape or a factory", aliases)


@each("name", ["big_box", "Big-Box", " big box ", "carton", Box])
def test_capitals_hyphens_and_spaces_do_not_matter_and_there_are_aliases(name):
    assert shapes().find(name).make({"size": 2}).given == (2, "red")
    assert shapes().find(name).make({"colour": "blue"}, 3).given == (3, "blue")


@each(
    ("name", "options", "leading", "sentence"),
    [
        ("big_bux", {}, [], "unknown shape 'big_bux'; did you mean 'big_box'?"),
        ("big_box", {"color": 1}, [1], "option of big_box 'color'; did you mean 'colour'?"),
        ("big_box", {"size": 2}, [1], "option of big_box 'size'; choose one of 'colour'"),
        ("big_box", {}, [], "shape big_box: missing a required argument: 'size'"),
        (Box, {}, [], "shape Box: missing a .* 'size'; expected a Shape or a factory"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, leading, sentence):
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?") + "$"):
        shapes().find(name).make(options, *leading)


@each("given", [3, None, int, Shape])
def test_what_is_none_and_makes_none_is_refused(given):
    expected = re.escape(f"shape: expected a name, a Shape or a factory, got {given!r}")
    with pytest.raises(TypeError, match=f"^{expected}$"):
        shapes(Box).find(given)


def test_one_that_is_ready_is_taken_as_it_is_without_options():
    box = Box(1)
    found = shapes().find(box)
    assert found.make({}, "leading", shared=1) is box
    with pytest.raises(ValueError, match="unknown option of .*Box.* 'size'; there is none to"):
        found.make({"size": 2})


def test_what_was_found_is_found_again():
    found = shapes().find("carton")
    assert shapes().find(found) is found


def test_functions_are_made_by_one_rule_too():
    kind = shapes(Callable, constant=lambda value=1: lambda step: value)
    assert kind.find("constant").make({"value": 3})(0) == 3
    assert kind.find(abs).make({})(-1) == 1


def test_what_is_made_must_be_one():
    with pytest.raises(TypeError, match="shape nothing: expected a Shape or a factory, got 3"):
        shapes(nothing=lambda: 3).find("nothing").make({})


def test_an_option_of_a_wrong_type_is_told_with_the_options():
    def broken(size: int) -> Box:
        return Box(size + 1)

    sentence = 'shape broken {"size": "a"}: can only concatenate str'
    with pytest.raises(TypeError, match=re.escape(sentence)):
        shapes(broken=broken).find("broken").make({"size": "a"})


def test_shared_options_are_for_those_that_take_them_and_are_not_offered():
    assert shapes().find("big_box").make({}, 1, colour="green", weight=3).given == (1, "green")
    with pytest.raises(ValueError, match="there is none to choose from"):
        shapes().find("big_box").make({"colour": "blue"}, 1, colour="green")


def test_a_factory_that_takes_any_option_gets_it():
    assert shapes(anything=lambda **o: Box(**o)).find("anything").make({"size": 2}).given[0] == 2


def test_a_class_that_hands_options_on_takes_those_of_its_base():
    assert list(shapes().find(Lid).takes) == ["size", "colour", "hinge", "options"]
    assert shapes().find(Lid).make({"hinge": False}, size=5).given == (5, "red")


@each("given", [0.5, type("Half", (), {"__module__": "__main__"})])
def test_numbers_and_classes_of_a_user_are_not_taken_for_names_of_another_library(given):
    with pytest.raises(TypeError, match=r"got [^;]*$"):
        shapes().find(given)


def test_one_may_come_from_a_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"from {__name__} import Box, Lid\nready = Box(7)\nnumber = 3\n")
    assert shapes().find(f"{file}:Lid").make({"size": 4}).given == (4, "red")
    assert shapes().find(f"{file}:ready").make({}).given == (7, "red")
    with pytest.raises(TypeError, match="own.py:number: expected a Shape or a factory, got 3"):
        shapes().find(f"{file}:number")
    with pytest.raises(ValueError, match="shape: unknown name in .*own.py 'redy'"):
        shapes().find(f"{file}:redy")
