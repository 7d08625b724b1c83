"""Schedules worked out for a length: every element once, nothing empty, copies without detours."""

from pydtnn.comm.schedules import SCHEDULES, rounds
from pydtnn.comm.schedules.executor import pieces, work_out
from pydtnn.comm.schedules.steps import ALL, add, part, receive, send
from tests.each import each


def test_arrays_are_cut_into_the_number_of_chunks_that_comes_nearest_to_their_length():
    assert [pieces(nbytes, 100) for nbytes in (0, 99, 149, 151, 1000)] == [1, 1, 1, 2, 10]


@each("n", [0, 3, 10, 100, 1013])
def test_chunks_cover_the_array_in_order(n):
    chunks = work_out(rounds("ring", 1, [0, 0, 0]), n, 4)
    ends = [0, *(chunk.elements.stop for chunk in chunks)]
    assert [chunk.elements.start for chunk in chunks] == ends[:-1]
    assert ends[-1] == n


@each("algorithm", SCHEDULES)
def test_no_message_is_empty(algorithm):
    for rank in range(5):
        for chunk in work_out(rounds(algorithm, rank, [0] * 5), 7, 2):
            for exchange in chunk.exchanges:
                assert exchange.incoming or exchange.outgoing
                for one in exchange.incoming:
                    assert one.where.start < one.where.stop
                for _, what in exchange.outgoing:
                    assert what.start < what.stop


def test_sums_land_side_by_side_in_scratch_memory():
    [chunk] = work_out([(add(1, part(0, 2)), add(2, part(0, 2)), send(3, part(1, 2)))], 10, 1)
    [exchange] = chunk.exchanges
    assert [one.lands for one in exchange.incoming] == [slice(0, 5), slice(5, 10)]
    assert [one.where for one in exchange.incoming] == [slice(0, 5)] * 2
    assert chunk.scratch == 10


@each(
    ("steps", "lands"),
    [
        ((receive(1, part(0, 2)), send(1, part(1, 2))), None),
        ((receive(1, ALL), send(1, ALL)), slice(0, 10)),
        ((receive(1, ALL), add(1, part(1, 2))), slice(0, 10)),
    ],
)
def test_copies_go_straight_to_their_place_where_nothing_else_happens_there(steps, lands):
    [chunk] = work_out([steps], 10, 1)
    assert chunk.exchanges[0].incoming[0].lands == lands
