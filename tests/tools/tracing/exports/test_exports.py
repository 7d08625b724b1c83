"""Traces of 4 ranks in each format, read by readers that check the format."""

import gzip
import json

import pytest

from pydtnn.tools.tracing import load_timeline, read_traces
from pydtnn.tools.tracing.exports import write_chrome, write_paraver
from pydtnn.tools.tracing.exports.paraver import BYTES, TYPES, ParaverState
from pydtnn.utils.observer import Kind
from tests.tools.tracing.paraver_reader import read_paraver
from tests.tools.tracing.synthetic import write_run

FIELDS = {
    "X": "args cat dur name pid tid ts",
    "M": "args name pid tid",
    "s": "cat id name pid tid ts",
    "f": "bp cat id name pid tid ts",
    "b": "cat id name pid tid ts",
    "e": "cat id name pid tid ts",
    "C": "args name pid tid ts",
}
"""Fields of each phase of events, as the document Trace Event Format demands."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    write_run(folder, steps=3, epochs=2, noise=0.2)
    return folder


@pytest.fixture(scope="module")
def timeline(folder):
    return load_timeline(folder)


@pytest.fixture(scope="module")
def chrome(timeline, folder):
    path = folder / "out" / "trace.json"
    write_chrome(timeline, path)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def paraver(timeline, folder):
    write_paraver(timeline, folder / "trace.prv")
    return read_paraver(folder / "trace.prv")


def of_phase(chrome, phase):
    return [event for event in chrome["traceEvents"] if event["ph"] == phase]


def test_events_of_chrome_have_the_fields_of_their_phase(chrome, timeline, folder):
    assert {*chrome} == {"displayTimeUnit", "otherData", "traceEvents"}
    for event in chrome["traceEvents"]:
        assert {*FIELDS[event["ph"]].split()} <= {*event}, event
        assert min(event.get("ts", 0), event.get("dur", 0)) >= 0
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in of_phase(chrome, "M")
    }
    used = {(event["pid"], event["tid"]) for event in of_phase(chrome, "X")}
    assert len(used) == 8
    for rank, thread in used:
        assert names["thread_name", rank, thread] == ["main", "loader 0"][thread - 1]
        assert names["process_name", rank, 1] == f"rank {rank} (node{rank // 2})"
    write_chrome(timeline, folder / "trace.json.gz")
    assert json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes())) == chrome


def test_slices_of_chrome_are_nested_and_have_the_times_of_activities(chrome, timeline):
    slices = of_phase(chrome, "X")
    activities = timeline.activities
    found = sorted((round(1000 * one["ts"]), round(1000 * one["dur"])) for one in slices)
    lengths = activities["stop"] - activities["start"]
    assert found == sorted(zip(activities["start"].tolist(), lengths.tolist(), strict=True))
    for thread in {(event["pid"], event["tid"]) for event in slices}:
        open_ends = []
        own = [event for event in slices if (event["pid"], event["tid"]) == thread]
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            start, end = (round(1000 * t) for t in (event["ts"], event["ts"] + event["dur"]))
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)


def test_arrows_of_chrome_begin_and_end_in_slices(chrome, timeline):
    starts, ends = of_phase(chrome, "s"), of_phase(chrome, "f")
    assert len(starts) == len(ends) == len(timeline.messages)
    assert sorted(event["id"] for event in starts) == sorted(event["id"] for event in ends)
    slices = [event for event in of_phase(chrome, "X") if event["cat"] == "wait"]
    for event in [*starts, *ends]:
        assert any(
            one["ts"] <= event["ts"] < one["ts"] + one["dur"]
            for one in slices
            if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
        )
    begun = {event["id"]: event["ts"] for event in of_phase(chrome, "b")}
    ended = {event["id"]: event["ts"] for event in of_phase(chrome, "e")}
    assert begun.keys() == ended.keys()
    assert len(begun) == 2 * len(timeline.messages)
    assert all(begun[key] <= ended[key] for key in begun)


def test_counters_of_chrome_end_with_the_bytes_that_were_counted(chrome, folder):
    last = {
        event["pid"]: event["args"]["B"]
        for event in of_phase(chrome, "C")
        if event["name"] == "bytes sent"
    }
    assert last == {trace.rank: trace.about["sent"] for trace in read_traces(folder)}
    memory = [e["args"]["B"] for e in of_phase(chrome, "C") if e["name"] == "memory in use"]
    assert {*memory} == {0, 1000}


def test_paraver_passes_a_strict_reader(paraver, timeline):
    assert paraver.duration == timeline.duration
    assert len(paraver.threads) == 8
    assert paraver.nodes == 2
    assert len(paraver.messages) == len(timeline.messages)
    sent = timeline.messages.sent
    assert sorted(message[:4] for message in paraver.messages) == sorted(
        (a["source"] + 1, a["target"] + 1, a["start"], b["stop"])
        for a, b in zip(sent, timeline.messages.received, strict=True)
    )


def test_paraver_has_an_event_for_each_beginning(paraver, timeline):
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WAIT):
        code = TYPES[kind][0]
        names = [
            paraver.values[code][value]
            for *_, got, value in paraver.events
            if got == code and value
        ]
        ids = timeline.activities["name"][timeline.select(kind=kind)]
        assert sorted(names) == sorted(timeline.names[i] for i in ids)
    total = sum(value for *_, code, value in paraver.events if code == BYTES)
    assert total == timeline.activities["nbytes"].sum()


def test_states_of_paraver_are_the_times_of_waits_and_batches(paraver, timeline):
    totals = dict.fromkeys(ParaverState, 0)
    for _, thread, begin, end, state in paraver.states:
        totals[ParaverState(state)] += (end - begin) * (thread == 1)
    activities = timeline.activities
    durations = activities["stop"] - activities["start"]
    waits = timeline.select(kind=Kind.WAIT)
    batches = timeline.select(kind=Kind.PHASE, name=timeline.name_id("data"))
    assert totals[ParaverState.WAITING] == durations[waits].sum()
    assert totals[ParaverState.INPUT] == durations[batches].sum()
