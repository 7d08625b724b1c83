"""The table names those that the others wait for."""

from __future__ import annotations

from pydtnn.comm.monitor.table import RankRow, awaited_ranks, ranges, sentence, table
from tests.each import each


def waiting(rank: int, **fields: object) -> RankRow:
    return RankRow(rank, "a", waits="iallreduce", group="all", number=7, seconds=5.0, **fields)


def test_a_rank_that_cannot_run_is_late_even_in_a_message():
    rows = [waiting(0), waiting(1), RankRow(2, "a", problem="stopped by a signal", seconds=5.0)]
    assert awaited_ranks(rows) == rows[2:]
    assert sentence(rows) == ("rank 2: stopped by a signal since 5 s; ranks 0-1 wait in iallreduce")


def test_a_rank_that_does_not_wait_is_late():
    rows = [RankRow(0, "a", doing="in the loader", threads=("loader 0: reads",)), waiting(1)]
    assert awaited_ranks(rows) == rows[:1]
    assert sentence(rows).startswith("rank 0: in the loader, loader 0: reads since 0 s; rank 1 w")


def test_a_rank_in_an_earlier_call_of_a_group_is_late():
    rows = [waiting(0), RankRow(1, "a", waits="barrier", group="all", number=5), waiting(2)]
    assert awaited_ranks(rows) == rows[1:2]
    assert (
        awaited_ranks([waiting(0), RankRow(1, "a", waits="recv", group="all", peer=0)]) == []
    )  # a message


def test_ranks_that_wait_for_each_other_are_equals():
    rows = [RankRow(0, "a", waits="recv", peer=1), RankRow(1, "a", waits="recv", peer=0)]
    assert awaited_ranks(rows) == []
    assert sentence(rows) == "ranks 0-1 wait in recv"
    assert "waits in recv with rank 1" in table(rows)


def test_ranks_that_compute_do_not_wait():
    rows = [RankRow(0, "a", doing="in forward of a"), RankRow(1, "a", doing="in forward of b")]
    assert sentence(rows) == "no rank waits for another"


def test_ranks_that_do_the_same_share_a_line():
    rows = [waiting(rank, epoch=2, step=8) for rank in (0, 1, 3)] + [RankRow(2, "a", doing="in x")]
    assert table(rows).splitlines() == [
        "rank    epoch  step  for    doing",
        "0-1, 3  2      8     5.0 s  waits in iallreduce",
        "2       -      -     0.0 s  in x",
    ]


def test_hosts_are_named_if_there_are_several():
    rows = [waiting(0), RankRow(1, "node2", problem="cannot be asked")]
    heading, first, second = table(rows).splitlines()
    assert heading.split()[:2] == ["rank", "host"]
    assert first.split()[:2] == ["0", "a"]
    assert second.split()[:2] == ["1", "node2"]


@each(("numbers", "text"), [([3], "3"), ([1, 0], "0-1"), ([0, 2, 3, 4, 9], "0, 2-4, 9")])
def test_runs_of_numbers_are_short(numbers, text):
    assert ranges(numbers) == text
