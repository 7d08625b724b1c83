import pytest

from pydtnn.tools.perfmodel.formulas import ALGORITHMS, NONE, Terms, terms_of
from tests.each import each

MANY = 1 << 20


def test_one_rank_needs_no_messages():
    assert all(terms_of(name, 1) == NONE for name in ALGORITHMS)


def test_the_published_formulas_for_eight_ranks():
    assert terms_of("ring", 8)[:3] == (14, 2 * 7 / 8, 7 / 8)
    assert terms_of("recursive_doubling", 8)[:3] == (3, 3, 3)
    assert terms_of("halving_doubling", 8)[:3] == (6, 2 * 7 / 8, 7 / 8)
    assert terms_of("binomial_tree", 8)[:3] == (6, 6, 3)


def test_ranks_beyond_a_power_of_two_add_two_messages_of_the_whole_array():
    for name in ("recursive_doubling", "halving_doubling"):
        inner, folded = (terms_of(name, ranks) for ranks in (8, 9))
        assert folded == inner.plus(Terms(2, 2, 1, 2))


@each("ranks", [2, 3, 4, 6, 7, 8, 12, 100, 1024])
def test_no_algorithm_sends_less_than_the_minimum(ranks):
    for name in ALGORITHMS:
        terms = terms_of(name, ranks)
        assert terms.sent >= 2 * (ranks - 1) / ranks - 1e-9
        assert terms.added >= (ranks - 1) / ranks - 1e-9


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="ring"):
        terms_of("rings", 2)
