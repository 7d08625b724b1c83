"""Numbers within limits."""

import numpy as np
import pytest

from pydtnn.utils.validate import check_bool, check_float, check_int
from tests.each import each


@each("value", [0, 0.5, np.float32(0.5), np.int64(0)])
def test_numbers_of_any_kind_within_the_limits_become_floats(value):
    checked = check_float("SGD", "momentum", value, at_least=0, below=1)
    assert type(checked) is float
    assert checked == value


@each("value", [-0.1, 1, float("nan"), float("inf")])
def test_numbers_out_of_the_limits_are_refused(value):
    with pytest.raises(
        ValueError, match=f"SGD: momentum must be at least 0 and below 1, got {value}"
    ):
        check_float("SGD", "momentum", value, at_least=0, below=1)


@each(("limits", "value"), [({"above": 0}, 0), ({"at_most": 1}, 1.5), ({"below": 1}, 1)])
def test_every_kind_of_limit_holds(limits, value):
    with pytest.raises(ValueError, match="who: what must be"):
        check_float("who", "what", value, **limits)


@each("value", ["0.1", None, True, [0.1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="SGD: momentum must be a number"):
        check_float("SGD", "momentum", value)


def test_whole_numbers_are_checked():
    assert check_int("Cosine", "steps", np.int64(3), at_least=1) == 3
    with pytest.raises(ValueError, match="Cosine: steps must be at least 1, got 0"):
        check_int("Cosine", "steps", 0, at_least=1)
    with pytest.raises(TypeError, match=r"Cosine: steps must be a whole number, got 2\.5"):
        check_int("Cosine", "steps", 2.5, at_least=1)
    with pytest.raises(ValueError, match="Loader: threads must be at most 9, got 10"):
        check_int("Loader", "threads", 10, at_least=1, at_most=9)
    assert check_int("Loader", "threads", 9, at_least=1, at_most=9) == 9


def test_numbers_that_no_float_holds_are_out_of_the_limits():
    with pytest.raises(ValueError, match="SGD: lr must be at most 1, got 1000"):
        check_float("SGD", "lr", 10**400, at_most=1)
    with pytest.raises(ValueError, match="train: --epochs must be at most 18446744073709551615"):
        check_int("train", "--epochs", 2**64, at_least=1)


@each("value", [True, False, np.True_])
def test_true_and_false_are_true_and_false(value):
    assert check_bool("SGD", "nesterov", value) is bool(value)


@each("value", [1, 0, "false", None, []])
def test_what_only_counts_as_true_or_false_is_refused(value):
    with pytest.raises(TypeError, match="SGD: nesterov must be true or false, got"):
        check_bool("SGD", "nesterov", value)
