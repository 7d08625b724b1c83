"""Records of what a rank does."""

from __future__ import annotations

import threading
import time

import numpy as np

from pydtnn.tools.tracing.recorder import MAX_LANES, Recorder
from pydtnn.tools.tracing.records import RECORD
from pydtnn.utils._recorder import RECORD_BYTES
from pydtnn.utils.observer import Kind, Observer


class Pool:
    in_use = 77


def names(recorder: Recorder) -> list[str]:
    return [recorder.names[record["name"]] for record in recorder.records()]


def run_steps(recorder: Recorder, steps: int, epoch: int = 0) -> None:
    recorder.begin(Kind.PHASE, "epoch")
    for step in range(steps):
        recorder.step(epoch, step)
        for phase in ("data", "step"):
            recorder.begin(Kind.PHASE, phase)
            recorder.begin(Kind.FORWARD, f"{phase} {step}")
            recorder.end()
            recorder.end()
        recorder.begin(Kind.PHASE, "callback")
        recorder.end()
    recorder.end()


def test_the_compiled_record_is_that_of_files():
    assert RECORD.itemsize == RECORD_BYTES


def test_a_record_contains_what_was_told_and_the_time():
    recorder = Recorder()
    recorder.watch(Pool)
    before = time.perf_counter_ns()
    recorder.step(2, 5)
    recorder.begin(Kind.PHASE, "step")
    recorder.begin(Kind.CALL, "iallreduce", nbytes=1 << 40, bucket=3)
    middle = time.perf_counter_ns()
    recorder.end()
    recorder.message(Kind.SENT, "all", 10, 30, peer=1, tag=7, nbytes=9)
    recorder.end()
    after = time.perf_counter_ns()
    message, call, step = recorder.records()  # in the order of their ends
    assert recorder.names == ["step", "epoch", "test", "iallreduce", "all"]
    for record, kind, name, depth in ((step, Kind.PHASE, 0, 0), (call, Kind.CALL, 3, 1)):
        assert (record["kind"], record["name"], record["depth"]) == (kind, name, depth)
        assert (record["lane"], record["epoch"], record["step"]) == (0, 2, 5)
        assert before <= record["start"] <= middle
        assert middle <= record["start"] + record["duration"] <= after
        assert (record["peer"], record["tag"]) == (-1, -1)
    assert (call["nbytes"], call["bucket"], call["memory"]) == (1 << 40, 3, -1)
    assert (step["nbytes"], step["bucket"], step["memory"]) == (0, -1, 77)
    assert message.tolist() == (Kind.SENT, 0, 1, 4, 2, 5, 10, 20, 9, 1, 7, -1, -1, -1)


def test_records_are_kept_when_chunks_are_full():
    recorder = Recorder()
    for number in range(40_000):
        recorder.begin(Kind.CALL, "send", nbytes=number)
        recorder.end()
    records = recorder.records()
    assert records["nbytes"].tolist() == list(range(40_000))
    assert (np.diff(records["start"]) >= 0).all()


def test_the_number_of_a_step_applies_to_its_phases_only():
    recorder = Recorder()
    run_steps(recorder, 2, epoch=4)
    recorder.begin(Kind.PHASE, "evaluation")
    recorder.end()
    steps = [(r["epoch"], r["step"]) for r in recorder.records()]
    one = [(4, 0)] * 4 + [(4, -1)] + [(4, 1)] * 4 + [(4, -1)]
    assert steps == [*one, (4, -1), (-1, -1)]  # the epoch, the evaluation


def test_of_a_range_of_steps_nothing_else_is_recorded():
    recorder = Recorder(range(3, 5))
    recorder.begin(Kind.PHASE, "start")
    recorder.end()
    run_steps(recorder, 4)
    run_steps(recorder, 4, epoch=1)
    told = [
        *("data 3", "data", "step 3", "step", "callback"),
        *("data 0", "data", "step 0", "step", "epoch"),  # which begins between the two steps
    ]
    assert names(recorder) == told
    records = recorder.records()
    assert records["epoch"].tolist() == [0] * 5 + [1] * 5
    assert records["depth"].tolist() == [1, 0, 1, 0, 0, 2, 1, 2, 1, 0]  # among what is recorded


def test_bytes_are_counted_while_it_is_recorded():
    recorder, sent = Recorder(range(1, 2)), [100]
    recorder.count(lambda: sent[0])
    for step in range(3):
        recorder.step(0, step)
        recorder.begin(Kind.PHASE, "step")
        sent[0] += 10**step
        recorder.end()
        sent[0] += 1000
    assert recorder.sent == 10
    always = Recorder()
    always.count(lambda: sent[0])
    sent[0] += 5
    assert always.sent == 5
    always.count(None)
    sent[0] += 5
    assert always.sent == 5


def test_every_thread_has_a_lane_of_its_own():
    recorder = Recorder()
    recorder.step(0, 8)

    def load(number: int) -> None:
        lane = recorder.lane(f"loader {number}")
        lane.step(99, 99)  # is that of the main thread
        for _ in range(5000):
            lane.begin(Kind.LOAD, "batch")
            lane.end()

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    recorder.begin(Kind.PHASE, "data")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.end()
    records = recorder.records()
    assert len(recorder.lanes) == 3
    assert recorder.lane("loader 1") is recorder.lane("loader 1")
    assert np.bincount(records["lane"]).tolist() == [1, 5000, 5000]
    assert set(records["step"].tolist()) == {8}
    assert (records["depth"] == 0).all()


def test_more_threads_than_records_can_name_and_too_deep_ones_are_not_recorded():
    recorder = Recorder()
    for number in range(MAX_LANES + 5):
        lane = recorder.lane(f"thread {number}")
        lane.begin(Kind.LOAD, "batch")
        lane.end()
    assert len(recorder.lanes) == MAX_LANES
    assert type(lane) is Observer
    assert recorder.records()["lane"].max() == MAX_LANES - 1
    recorder = Recorder()
    for number in range(100):
        recorder.begin(Kind.KERNEL, f"kernel {number}")
    for _ in range(101):  # one more than has begun
        recorder.end()
    assert names(recorder) == [f"kernel {number}" for number in reversed(range(64))]
