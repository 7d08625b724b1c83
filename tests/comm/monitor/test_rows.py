"""For how long a rank has been in the same activity, and when that is too long."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest

from pydtnn.comm.monitor.links import INTERVAL_S
from pydtnn.comm.monitor.processes import Condition
from pydtnn.comm.monitor.slots import SLOT, Doing, Slot
from pydtnn.comm.monitor.supervision import CurrentActivity
from pydtnn.comm.monitor.table import RankRow, Watched, describe
from pydtnn.utils.observer import Kind
from tests.each import each


class Ranks:
    """Ranks whose time passes as the test says."""

    def __init__(self, size: int = 2, timeout: float = 3.0) -> None:
        memory = memoryview(bytearray(size * SLOT))
        slots = [Slot(memory, place) for place in range(size)]
        for rank, slot in enumerate(slots):
            slot.clear(rank, timeout)
            slot.words[0] = rank + 1  # the process
        self.activities = [CurrentActivity(slot) for slot in slots]
        self.conditions = {rank + 1: Condition() for rank in range(size)}
        self.watched = Watched(slots, "here", self.conditions.__getitem__)
        self.now = 100.0
        self.watched.look(self.now)

    def after(self, seconds: float):
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            rows = self.watched.look(self.now)
        return rows


def test_a_wait_expires_when_the_rank_has_been_in_it_for_that_long():
    ranks = Ranks()
    for number in range(4):
        ranks.activities[0].call("allreduce", "all", number, -1)
        assert not ranks.after(2)[0].expired  # each wait has a deadline of its own
        ranks.activities[0].called()
    ranks.activities[0].call("allreduce", "all", 5, -1)
    assert [row.expired for row in ranks.after(3)] == [False, False]
    first, second = ranks.after(1)
    assert (first.expired, first.waits) == (True, "allreduce")
    assert not second.expired  # it computes, or is outside of any activity
    endless = Ranks(timeout=0)
    endless.activities[0].call("allreduce", "all", 1, -1)
    assert not endless.after(500)[0].expired


def test_waiting_for_a_batch_expires_and_computing_does_not():
    ranks = Ranks()
    ranks.activities[0].begin(Kind.PHASE, "data")
    ranks.activities[1].begin(Kind.FORWARD, "conv0")
    assert [row.expired for row in ranks.after(5)] == [True, False]


def test_a_stopped_rank_does_not_wait_meanwhile():
    ranks = Ranks()
    for rank in (0, 1):
        ranks.activities[rank].call("allreduce", "all", 1, -1)
        ranks.conditions[rank + 1] = Condition("stopped", frozen=True)
    rows = ranks.after(60)
    assert not any(row.expired for row in rows)
    assert rows[0].seconds == pytest.approx(60, abs=1)
    assert rows[0].problem == "stopped"
    assert rows[0].waits == ""


def test_a_job_that_is_stopped_as_a_whole_has_not_waited():
    ranks = Ranks()
    ranks.activities[0].call("allreduce", "all", 1, -1)
    ranks.after(1)
    ranks.now += 3600  # nobody looks
    assert not ranks.after(0.5)[0].expired


@each("name", ["download", "examination"])
def test_a_download_and_the_first_reading_may_take_any_time(name):
    ranks = Ranks()
    activity = ranks.activities[1]
    activity.begin(Kind.PHASE, name)
    for _ in range(4):
        assert [row.unlimited for row in ranks.after(2)] == [False, True]
        activity.begin(Kind.PHASE, name)  # a part of the files
        activity.end()


@each("condition", [Condition(), Condition("stopped", frozen=True)])
def test_the_first_reading_has_a_deadline_for_each_part_of_the_files(condition):
    ranks = Ranks()
    ranks.activities[1].begin(Kind.PHASE, "examination")
    ranks.activities[0].call("allgather", "all", 1, -1)
    assert ranks.after(2)[1].unlimited
    ranks.conditions[2] = condition
    first, second = ranks.after(3.5)
    assert first.expired
    assert (second.unlimited, second.expired) == (False, not condition.frozen)


def test_the_row_of_a_rank_that_has_ended_names_no_problem():
    ranks = Ranks()
    ranks.activities[0].slot.close()
    del ranks.conditions[1]
    row, _ = ranks.after(1)
    assert (row.doing, row.problem, row.expired) == ("has ended", "", False)


def test_a_call_is_described_with_its_bucket_and_layer():
    ranks = Ranks()
    activity = ranks.activities[0]
    activity.begin(Kind.PHASE, "exchange", bucket=7)
    activity.begin(Kind.WAIT, "iallreduce")
    activity.call("iallreduce", "all", 9, -1)
    assert ranks.after(1)[0].waits == "iallreduce of bucket 7"
    activity.called()
    activity.begin(Kind.FORWARD, "norm1")
    activity.call("recv", "all", 0, 1)
    row = ranks.after(1)[0]
    assert row.waits == "recv of bucket 7 in forward of norm1"
    assert row.peer == 1


@each(
    ("stack", "text"),
    [
        ([], "outside of training"),
        (
            [Doing(Kind.PHASE, "epoch"), Doing(Kind.PHASE, "data")],
            "in the loader, waits for a batch",
        ),
        ([Doing(Kind.FORWARD, "conv0")], "in forward of conv0"),
        ([Doing(Kind.BACKWARD, "conv0"), Doing(Kind.KERNEL, "gemm")], "in the kernel gemm, in b"),
        ([Doing(Kind.LOAD, "batch")], "prepares a batch"),
        ([Doing(Kind.PHASE, "exchange"), Doing(Kind.WAIT, "send", 3)], "in send of bucket 3, in e"),
    ],
)
def test_nested_activities_are_described_by_the_innermost(stack, text):
    assert describe(stack).startswith(text)


def test_rows_can_be_sent():
    row = Ranks().after(1)[0]
    values = json.loads(json.dumps(astuple(row)))
    assert RankRow.from_json(values) == row
    _, *others = values
    for bad in (None, [], values[:-1], [*values[:-1], [1]], ["0", *others], [True, *others]):
        with pytest.raises(ValueError, match="a row has other values"):
            RankRow.from_json(bad)
