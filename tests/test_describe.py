"""Errors told in one line (`pydtnn.errors`)."""

import pytest

from pydtnn.errors import AgreedError, RankError, describe


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a sentence."),
        TypeError("a sentence."),
        FileNotFoundError("a sentence."),
        ImportError("a sentence."),
        AgreedError("a sentence."),
        ValueError("a\n   sentence."),
    ],
)
def test_a_message_for_the_user_stands_by_itself(error):
    assert describe(error) == "a sentence."


def test_a_fault_is_told_with_its_type_and_place():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert describe(caught.value).startswith("ZeroDivisionError: division by zero (/")
    assert "test_describe.py:25; PYDTNN_TRACEBACK=1" in describe(caught.value)


@pytest.mark.parametrize("error", [ValueError(), AssertionError()])
def test_an_error_without_words_is_told_by_its_type(error):
    assert describe(error) == f"{type(error).__name__} (PYDTNN_TRACEBACK=1 shows where)"


def test_an_error_of_another_rank_names_it():
    assert describe(RankError(3, "out of memory")) == "rank 3: out of memory"


def test_an_interrupt_is_no_fault():
    assert describe(KeyboardInterrupt()) == "interrupted (Ctrl-C)"
