"""Schedules worked out for a length: every element once, nothing empty, copies without detours."""

from pydtnn.comm.schedules import SCHEDULES, rounds
from pydtnn.comm.schedules.executor import pieces, work_out
from tests.each import each


def test_arrays_are_cut_into_the_number_of_chunks_that_comes_nearest_to_their_length():
    assert [pieces(nbytes, 100) for nbytes in (0, 99, 149, 151, 1000)] == [1, 1, 1, 2, 10]


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
