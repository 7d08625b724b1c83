import numpy as np

from pydtnn.data.order import assign_shards, below, permutation, rank_slice
from tests.each import each


def test_a_permutation_depends_on_seed_epoch_and_name_alone():
    """It is the same on every machine and with every version of NumPy."""
    one = permutation(1, 2, 50)
    np.testing.assert_array_equal(np.sort(one), np.arange(50))
    for other in (permutation(2, 2, 50), permutation(1, 3, 50), permutation(1, 2, 50, "x")):
        assert (other != one).any()
    assert permutation(0, 0, 8).tolist() == [6, 3, 5, 2, 1, 0, 4, 7]


@each("size", [1, 2, 3, 7, 20])
@each("n", [0, 1, 12, 13])
def test_ranks_cut_a_batch_as_array_split_does(n, size):
    rows = np.arange(n)
    for rank, expected in enumerate(np.array_split(rows, size)):
        np.testing.assert_array_equal(rows[rank_slice(n, rank, size)], expected)


def test_random_words_become_numbers_below_a_bound_that_all_occur():
    words = np.array([0, 2**32 // 3, 2**32 // 3 + 1, 2**32 - 1], np.uint32)
    assert below(words, 3).tolist() == [0, 0, 1, 2]
    assert below(words, np.array([1, 4, 4, 7])).tolist() == [0, 1, 1, 6]


@each("n", [0, 1, 5, 11, 64])
@each("shards", [1, 3, 8])
def test_shards_do_not_depend_on_the_ranks_that_own_them(n, shards):
    whole = [(s.number, range(n)[s.rows]) for s in assign_shards(n, shards, 0, 1)[1]]
    assert [row for _, rows in whole for row in rows] == list(range(n))
    for size in range(1, shards + 1):
        found = []
        for rank in range(size):
            rows, own = assign_shards(n, shards, rank, size)
            found += [(s.number, range(n)[rows][s.rows]) for s in own]
        assert found == whole


def test_shards_without_rows_cost_nothing():
    """Else a million shards of 5 rows would be a million times a million cuts."""
    rows, own = assign_shards(5, 10**15, 0, 2)
    assert (rows, [shard.number for shard in own]) == (slice(0, 5), [0, 1, 2, 3, 4])
    assert assign_shards(5, 10**15, 1, 2) == (slice(5, 5), ())
