"""Errors told in one line (`pydtnn.utils.errors`)."""

import pytest

from pydtnn.utils.errors import AgreedError, RankError, describe, requested_traceback
from tests.each import each


@each(
    ("error", "told"),
    [
        (ValueError("a\n   sentence."), "a sentence."),
        (TypeError("a sentence."), "a sentence."),
        (FileNotFoundError("a sentence."), "a sentence."),
        (ImportError("a sentence."), "a sentence."),
        (AgreedError("a sentence."), "a sentence."),
        (ValueError("Größe 大きさ ≤ 5"), "Größe 大きさ ≤ 5"),
        (ValueError(), "ValueError (PYDTNN_TRACEBACK=1 shows where)"),
        (AssertionError(), "AssertionError (PYDTNN_TRACEBACK=1 shows where)"),
        (RankError(3, "out of memory"), "rank 3: out of memory"),
        (KeyboardInterrupt(), "interrupted (Ctrl-C)"),
    ],
)
def test_an_error_is_told_in_one_line(error, told):
    assert describe(error) == told


def test_a_fault_is_told_with_its_type_and_place():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert describe(caught.value).startswith("ZeroDivisionError: division by zero (/")
    place = f"test_describe.py:{caught.traceback[-1].lineno + 1}; PYDTNN_TRACEBACK=1"
    assert place in describe(caught.value)


class Unspeakable(ValueError):
    """Cannot be shown."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


@each("error", [ZeroDivisionError(), SystemExit(0), KeyboardInterrupt()])
def test_an_error_whose_message_cannot_be_computed_is_told_by_its_type(error):
    told = f"__str__ raises {type(error).__name__}"
    assert describe(Unspeakable(error)).startswith("Unspeakable: its message cannot be shown")
    assert told in describe(Unspeakable(error))


@each("kind", [ValueError, KeyError])
def test_no_escape_sequence_of_a_message_reaches_the_terminal(kind, monkeypatch):
    error = kind("file \x1b[2J\x07\x9b31m \u202e name")
    assert describe(error).isprintable()
    assert "x1b[2J" in describe(error)
    monkeypatch.setenv("PYDTNN_TRACEBACK", "1")
    assert requested_traceback(error).replace("\n", "").isprintable()
