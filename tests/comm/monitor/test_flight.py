"""Flight records: the newest records of a slot, as files of a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pydtnn.comm.monitor.flight import FIELDS, FORMAT, KINDS, remove_stale, write_flight
from pydtnn.comm.monitor.slots import CAPACITY, RECORD, SLOT, Slot
from pydtnn.comm.monitor.supervision import CurrentActivity
from pydtnn.comm.monitor.table import RankRow
from pydtnn.tools.tracing import RankTrace, load_timeline, read_traces
from pydtnn.tools.tracing import records as trace_records
from pydtnn.tools.tracing.command import main
from pydtnn.utils.observer import Kind


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    found = Slot(memoryview(bytearray(SLOT)))
    found.clear(0, 5.0)
    found.folder = str(tmp_path / "run" / "flight")
    return found


def written(slot: Slot) -> RankTrace:
    write_flight(slot, RankRow(0, "here", problem="stopped", seconds=2.5), 1, "a test")
    (trace,) = read_traces(slot.folder)
    return trace


def names(trace: RankTrace) -> list[str]:
    return [trace.names[one] for one in trace.records["name"]]


def test_the_format_is_that_of_traces():
    assert np.dtype([*FIELDS]) == trace_records.RECORD
    assert FORMAT.size == RECORD == trace_records.RECORD.itemsize
    assert len(Kind) == KINDS


def test_activities_in_progress_are_the_last_records(slot):
    activity = CurrentActivity(slot)
    activity.step(2, 7)
    with activity.activity(Kind.PHASE, "data"):
        pass
    activity.begin(Kind.PHASE, "step")
    activity.group("all/0.1")
    activity.begin(Kind.CALL, "iallreduce", nbytes=48, bucket=3)
    activity.message(Kind.SENT, "all", 5, 9, peer=0, tag=4, nbytes=12)
    trace = written(slot)
    assert names(trace) == ["all", "data", "iallreduce", "step"]
    flight = trace.about["flight"]
    assert (flight["in progress"], flight["problem"], flight["seconds"]) == (2, "stopped", 2.5)
    assert (flight["epoch"], flight["step"], flight["why"]) == (2, 7, "a test")
    call = trace.records[2]
    assert (call["nbytes"], call["bucket"], call["tag"], call["depth"]) == (48, 3, 1, 1)
    assert trace.records["duration"][0] == 4
    assert (trace.records["duration"] >= 0).all()
    timeline = load_timeline(slot.folder)
    found = [timeline.names[name] for name in timeline.activities["name"]]
    assert (sorted(found), len(timeline.messages)) == (["data", "iallreduce", "step"], 0)
    assert len(timeline.messages.unmatched_sent) == 1
    for command in (["summary"], ["export", "--to=chrome"]):
        assert main([*command, slot.folder]) == 0


def test_collective_calls_are_numbered_by_group(slot):
    activity = CurrentActivity(slot)
    for group, name in (
        *(("all", "barrier"), ("all", "isend"), ("all", "test"), ("a", "allreduce")),
        *(("all", "gather_object"), ("a", "exchange")),
    ):
        activity.group(group)
        activity.begin(Kind.CALL, name)
        activity.begin(Kind.PHASE, "inner")  # otherwise a test without effect is left out
        activity.end()
        activity.end()
    trace = written(slot)
    calls = trace.records[trace.records["kind"] == Kind.CALL]
    found = [(trace.names[one["group"]], one["tag"]) for one in calls]
    assert found == [("all", 1), ("all", -1), ("all", -1), ("a", 1), ("all", 2), ("a", -1)]


def test_the_newest_records_replace_the_oldest(slot):
    activity = CurrentActivity(slot)
    activity.begin(Kind.PHASE, "epoch")
    for number in range(3 * CAPACITY):
        activity.begin(Kind.FORWARD, "layer", nbytes=number)
        activity.end()
    trace = written(slot)
    numbers = trace.records["nbytes"].tolist()
    assert numbers == [*range(3 * CAPACITY - len(numbers), 3 * CAPACITY)]
    assert len(numbers) == CAPACITY - 1
    assert trace.about["flight"]["written"] == 3 * CAPACITY + 1
    activity.end()  # whose beginning has been replaced
    assert names(written(slot))[-1] == "epoch"


def test_a_test_that_finds_nothing_is_no_record(slot):
    activity = CurrentActivity(slot)
    activity.begin(Kind.PHASE, "step")
    activity.lane("loader 0")
    for _ in range(100):
        activity.begin(Kind.CALL, "test")
        activity.end()
    trace = written(slot)
    assert names(trace) == ["step"]
    assert trace.about["lanes"] == ["main", "loader 0"]


def test_files_of_more_ranks_are_removed(tmp_path):
    for rank in range(4):
        (tmp_path / f"rank-{rank:04}.npz").touch()
    remove_stale(str(tmp_path), 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0000.npz", "rank-0001.npz"]


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(slot, tmp_path):
    (tmp_path / "run").touch()
    CurrentActivity(slot)
    with pytest.raises(OSError, match="run"):
        written(slot)
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]
