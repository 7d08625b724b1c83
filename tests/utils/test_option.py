"""Options of a class: declared once, checked whenever they are set."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass

import pytest

from pydtnn.utils.option import option, set_options, signature_of
from tests.each import each


class Tea:
    """Something with options of every kind."""

    cups: int = option(2, at_least=1)
    strength: float = option(0.5, above=0, below=1)
    hot: bool = option(True)
    kind: str = option("green", among=("green", "black"))
    sugar: float | None = option(float, at_least=0)
    extras: dict[str, int] = option({})

    def __init__(self, water: str, **options: object) -> None:
        set_options(self, options)


OPTIONS = ["cups", "strength", "hot", "kind", "sugar", "extras"]


class MilkTea(Tea):
    milk: float = option(0.1, at_least=0)


def test_options_have_defaults_until_they_are_set():
    tea = MilkTea("soft", cups=3, hot=False)
    assert (tea.cups, tea.strength, tea.hot, tea.kind, tea.milk) == (3, 0.5, False, "green", 0.1)
    assert (Tea("soft").cups, Tea("soft").sugar) == (2, None)


@each(
    ("name", "value", "sentence"),
    [
        ("cups", 0, "MilkTea: cups must be at least 1, got 0"),
        ("cups", True, "MilkTea: cups must be a whole number, got True"),
        ("strength", 1, "MilkTea: strength must be above 0 and below 1, got 1"),
        ("strength", "much", "MilkTea: strength must be a number, got 'much'"),
        ("hot", 1, "MilkTea: hot must be true or false, got 1"),
        ("kind", "blak", "MilkTea: unknown value of kind 'blak'; did you mean 'black'?"),
        ("kind", 3, "MilkTea: kind must be text, got 3"),
        ("extras", 1, 'MilkTea: extras must be names and values, such as {"name": 1}, got 1'),
        ("mlik", 3, "unknown option of MilkTea 'mlik'; did you mean 'milk'?"),
    ],
)
def test_what_does_not_suit_is_refused(name, value, sentence):
    with pytest.raises((TypeError, ValueError)) as error:
        MilkTea("soft", **{name: value})
    assert str(error.value) == sentence


def test_a_dataclass_takes_them_for_its_defaults():
    @dataclass(frozen=True)
    class Cup:
        size: float = option(0.25, above=0)
        notes: dict[str, int] = option({})

    first = Cup(size=1)
    first.notes["hot"] = 1
    assert (first.size, type(first.size), Cup().size, Cup().notes) == (1.0, float, 0.25, {})
    with pytest.raises(ValueError, match="Cup: size must be above 0, got 0"):
        Cup(size=0)
    with pytest.raises(FrozenInstanceError):
        first.size = 2.0  # type: ignore[misc]


def test_they_are_checked_when_they_are_set_later_too():
    tea = Tea("soft")
    tea.strength = 0.25
    with pytest.raises(ValueError, match="strength must be above 0 and below 1, got 2"):
        tea.strength = 2
    assert tea.strength == 0.25


def test_a_class_is_called_with_its_options():
    parameters = signature_of(MilkTea).parameters
    assert list(parameters) == ["water", *OPTIONS, "milk"]
    assert parameters["cups"].default == 2
    assert parameters["cups"].kind is inspect.Parameter.KEYWORD_ONLY

    class Cup(Tea):
        def __init__(self, water: str, *, size: int) -> None:
            super().__init__(water)

    assert list(signature_of(Cup).parameters) == ["water", "size"]  # takes no further keywords


def test_arguments_of_a_class_precede_those_that_it_passes_on_by_name():
    class Iced(MilkTea):
        def __init__(self, ice: int, water: str, **options: object) -> None:
            super().__init__(water, **options)

    kinds = {name: p.kind.name for name, p in signature_of(Iced).parameters.items()}
    assert list(kinds)[:2] == ["ice", "water"]
    assert {kinds["ice"], kinds["water"]} == {"POSITIONAL_OR_KEYWORD"}
