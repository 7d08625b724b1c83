from __future__ import annotations

import numpy as np
import pytest

from pydtnn.data.order import below, permutation, rank_slice


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_a_permutation_has_each_number_once(n: int) -> None:
    np.testing.assert_array_equal(np.sort(permutation(3, 5, n)), np.arange(n))


def test_seed_epoch_and_name_each_change_the_permutation_and_nothing_else_does() -> None:
    one = permutation(1, 2, 50)
    np.testing.assert_array_equal(permutation(1, 2, 50), one)
    for other in (permutation(2, 2, 50), permutation(1, 3, 50), permutation(1, 2, 50, "x")):
        assert (other != one).any()


def test_a_permutation_is_the_same_on_every_machine_and_with_every_version_of_numpy() -> None:
    assert permutation(0, 0, 8).tolist() == [6, 3, 5, 2, 1, 0, 4, 7]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("n", [0, 1, 12, 13])
def test_ranks_cut_a_batch_as_array_split_does(n: int, size: int) -> None:
    rows = np.arange(n)
    for rank, expected in enumerate(np.array_split(rows, size)):
        np.testing.assert_array_equal(rows[rank_slice(n, rank, size)], expected)


def test_random_words_become_numbers_below_a_bound_that_all_occur() -> None:
    words = np.array([0, 2**32 // 3, 2**32 // 3 + 1, 2**32 - 1], np.uint32)
    assert below(words, 3).tolist() == [0, 0, 1, 2]
    assert below(words, np.array([1, 4, 4, 7])).tolist() == [0, 1, 1, 6]
