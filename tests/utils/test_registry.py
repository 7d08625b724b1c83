"""Things by name."""

from __future__ import annotations

import re

import pytest

from pydtnn.utils.registry import create


def box(size: int, colour: str = "red") -> tuple[int, str]:
    return size, colour


def test_capitals_hyphens_and_spaces_do_not_matter():
    registry = {"big_box": box}
    for name in ("big_box", "Big-Box", " big box "):
        assert create("shape", registry, name, {"size": 2}) == (2, "red")


def test_aliases_and_leading_arguments():
    made = create("shape", {"box": box}, "carton", {}, args=(3,), aliases={"carton": "box"})
    assert made == (3, "red")


@pytest.mark.parametrize(
    ("name", "options", "args", "sentence"),
    [
        ("bux", {}, (), "unknown shape 'bux'; did you mean 'box'?"),
        ("box", {"color": "blue"}, (1,), "unknown option of box 'color'; did you mean 'colour'?"),
        ("box", {"size": 2}, (1,), "unknown option of box 'size'; choose one of 'colour'"),
        ("box", {}, (), "shape box: missing a required argument: 'size'"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, args, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence) + "$"):
        create("shape", {"box": box}, name, options, args=args)


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match="shape: expected"):
        create("shape", {"box": box}, 3, {})


def test_a_factory_that_takes_any_option_gets_it():
    def anything(**options: int) -> dict[str, int]:
        return options

    assert create("thing", {"anything": anything}, "anything", {"size": 2}) == {"size": 2}
