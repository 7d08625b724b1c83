import numpy as np
import pytest

from pydtnn.tools.tracing import RECORD, load_timeline, write_trace
from pydtnn.tools.tracing.timeline import ACTIVITY, MESSAGE, ActivityRecord, Message
from pydtnn.utils.observer import Kind
from tests.tools.tracing.synthetic import LAYERS, MS, write_run


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    write_run(folder, steps=4, epochs=2)
    return load_timeline(folder)


def test_the_clocks_of_all_ranks_are_those_of_rank_0(timeline):
    """The k-th step begins 0.1 ms later on each rank, which is how the run was written."""
    first = timeline.steps.start[0]
    np.testing.assert_allclose(np.diff(first), MS // 10, atol=2)  # ns: clocks are rounded
    assert timeline.activities["start"].min() == 0


def test_a_step_begins_with_its_batch_and_its_parts_add_up(timeline):
    steps = timeline.steps
    assert [*zip(steps.epochs, steps.numbers, strict=True)] == [
        (e, s) for e in (1, 2) for s in range(4)
    ]
    for rank in range(4):
        phases = timeline.activities[timeline.select(rank=rank, kind=Kind.PHASE)]
        data = phases[phases["name"] == timeline.name_id("data")]
        np.testing.assert_array_equal(steps.start[:, rank], data["start"])
        own = timeline.activities[timeline.select(rank=rank, main=True)]
        placed = steps.place(rank, own["start"])
        for step in range(len(steps)):
            inside = own[(placed == step) & (own["name"] != timeline.name_id("epoch"))]
            assert inside["own"].sum() == steps.stop[step, rank] - steps.start[step, rank]


def test_activities_know_what_they_are_nested_in(timeline):
    activities = timeline.activities
    for name in LAYERS:
        chosen = timeline.select(kind=Kind.BACKWARD, name=timeline.name_id(name))
        parents = activities[activities["parent"][chosen]]
        assert {timeline.names[i] for i in parents["name"]} == {"backward"}
        assert (parents["rank"] == activities["rank"][chosen]).all()
    assert (activities["parent"][timeline.select(kind=Kind.LOAD)] == -1).all()


def test_the_innermost_activity_that_contains_another_is_found(timeline):
    activities = timeline.activities
    phases = activities["kind"] == Kind.PHASE
    found = timeline.ancestor(phases)
    waits = timeline.select(kind=Kind.WAIT)
    assert {timeline.names[activities["name"][i]] for i in found[waits]} == {"exchange"}
    assert (found[phases] == np.flatnonzero(phases)).all()
    assert (found[timeline.select(kind=Kind.LOAD)] == -1).all()


def test_every_message_arrives_after_it_was_sent(timeline):
    messages = timeline.messages
    assert len(messages) == 8 * 4 * 2 * 2  # steps, ranks, buckets, rounds
    assert len(messages.unmatched_sent) == len(messages.unmatched_received) == 0
    assert (messages.received["stop"] > messages.sent["start"]).all()
    for field in ("group", "source", "target", "tag", "nbytes", "epoch", "step"):
        np.testing.assert_array_equal(messages.sent[field], messages.received[field])


def test_times_outside_of_steps_have_no_step(timeline):
    steps = timeline.steps
    times = np.array([steps.start[0, 1] - 1, steps.start[3, 1], steps.stop[-1, 1]])
    assert steps.place(1, times).tolist() == [-1, 3, -1]


def test_an_activity_whose_parent_was_not_recorded_has_none(tmp_path):
    """Recording ends within a step: the phases that are still open have no record."""
    clock = {"offset": 0, "drift": 0.0, "origin": 0, "error": 0}
    about = {"rank": 0, "size": 2, "lanes": ["main"], "clock": clock}
    records = np.zeros(2, RECORD)
    records["start"], records["duration"], records["depth"] = (20, 30), 5, (2, 1)
    write_trace(tmp_path, records, ["phase"], about)
    records = records[:1].copy()  # of another rank, meanwhile
    records["start"], records["duration"], records["depth"] = 10, 100, 0
    write_trace(tmp_path, records, ["phase"], about | {"rank": 1})
    timeline = load_timeline(tmp_path)
    assert timeline.activities["parent"].tolist() == [-1, -1, -1]
    assert timeline.activities["own"].tolist() == [5, 5, 100]
    assert (timeline.activities["start"].tolist(), timeline.duration) == ([10, 20, 0], 100)
    about["size"] = 1
    write_trace(tmp_path / "empty", np.zeros(0, RECORD), [], about)
    empty = load_timeline(tmp_path / "empty")
    assert empty.duration == 0
    assert len(empty.activities) == len(empty.messages) == len(empty.steps) == 0


def test_rows_have_the_fields_of_the_arrays(timeline):
    assert ActivityRecord._fields == ACTIVITY.names
    assert Message._fields == MESSAGE.names
    chosen = timeline.select(kind=Kind.FORWARD, rank=2)
    rows = list(timeline.rows(chosen))
    assert [row.start for row in rows] == timeline.activities["start"][chosen].tolist()
    sent, received = next(timeline.messages.pairs())
    assert sent.start == timeline.messages.sent["start"][0]
    assert received.stop == timeline.messages.received["stop"][0]
