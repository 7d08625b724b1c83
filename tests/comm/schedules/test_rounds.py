"""Parts of arrays, and what is no schedule."""

import pytest

from pydtnn.comm.schedules import rounds
from pydtnn.comm.schedules.steps import ALL, halved, part, send
from tests.each import each


def test_a_piece_of_a_part_is_a_part_and_is_counted_modulo():
    assert part(1, 2).cut(2, 3) == part(5, 6) == part(-1, 6) == part(11, 6)
    for ranks in (1, 2, 4, 8, 16):
        pieces = sorted(halved(rank, ranks) for rank in range(ranks))
        assert pieces == [part(j, ranks) for j in range(ranks)]


def test_an_unknown_name_and_a_rank_outside_the_group_are_refused():
    with pytest.raises(ValueError, match="unknown allreduce schedule 'rink'; did you mean 'ring'"):
        rounds("rink", 0, "ab")
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        rounds("ring", 2, "ab")


@each(
    ("yielded", "sentence"),
    [
        ([send(0, ALL)], "round 0 of rank 1 must be a tuple of steps, .*; a comma makes"),
        ([(), 3], "round 1 of rank 1 must be a tuple of steps, got 3"),
        ([(send(0, ALL), 3)], "round 0 of rank 1 must contain only send, receive and add, got 3"),
        (None, "an algorithm must yield rounds, got return value None"),
    ],
)
def test_what_are_no_rounds_is_told(yielded, sentence):
    def mine(group):
        return yielded

    with pytest.raises(TypeError, match=f"mine: {sentence}"):
        rounds(mine, 1, "ab")
