"""Random cases are the same in every run, end in time, and say how to run one of them again."""

import numpy as np

from tests.random_cases import Cases


def test_a_case_draws_the_same_numbers_whenever_it_runs():
    first = [case.rng.random() for case, _ in zip(Cases("k", "t", 60.0), range(3), strict=False)]
    alone = [case.rng.random() for case in Cases("k", "t", 60.0, only=2)]
    assert alone == first[2:]
    assert len({*first}) == 3


def test_no_time_is_time_for_one_case():
    cases = Cases("k", "t", 0.0)
    for case in cases:
        case.compare(np.testing.assert_equal, 1, 1)
    assert (cases.done, cases.comparisons, cases.current) == (1, 1, None)


NUMBERS = """
import pytest

@pytest.mark.fuzz("numbers")
def test_numbers_are_small(cases):
    for case in cases:
        assert case.number < 3

@pytest.mark.fuzz("words")
def test_words(cases):
    for case in cases:
        pass

def test_other():
    pass
"""


def test_a_kind_is_selected_and_a_failure_names_its_case(pytester):
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(NUMBERS)
    result = pytester.runpytest("--fuzz-minutes", "1", "--fuzz-kind", "numbers")
    result.stdout.fnmatch_lines(
        ["It failed. Again: pytest '*test_numbers_are_small' --fuzz-case 3", "numbers: 3 cases*"]
    )
    result.assert_outcomes(failed=1, deselected=2)
    result = pytester.runpytest("--fuzz-minutes", "0", "--fuzz-kind", "all")
    result.stdout.fnmatch_lines(["numbers: 1 cases, *", "words: 1 cases, *"])
    result.assert_outcomes(passed=2, deselected=1)
