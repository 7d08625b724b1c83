"""Slots show what a rank is doing to the process that reads them."""

from __future__ import annotations

import os

import pytest

from pydtnn.comm.monitor.slots import DEEPEST, MAX_NAMES, MOST_LANES, SLOT, CurrentCall, Doing, Slot
from pydtnn.comm.monitor.supervision import CurrentActivity
from pydtnn.utils.observer import Kind


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(3 * SLOT))


def written(memory: memoryview) -> Slot:
    slot = Slot(memory, 1)
    slot.clear(7, 2.5)
    return slot


def test_another_process_reads_what_a_rank_is_doing(memory):
    activity = CurrentActivity(written(memory))
    activity.step(3, 41)
    activity.begin(Kind.PHASE, "step")
    activity.begin(Kind.BACKWARD, "stage1.conv0")
    activity.begin(Kind.WAIT, "iallreduce", bucket=5)
    activity.call("iallreduce", "all/0.0", 12, -1)
    loader, moves = activity.lane("loader 0"), Slot(memory, 1).read().moves
    loader.begin(Kind.LOAD, "batch")
    content = Slot(memory, 1).read()
    assert content.moves == moves  # those of the main thread
    assert (content.rank, content.pid, content.timeout) == (7, os.getpid(), 2.5)
    assert (content.epoch, content.step) == (3, 41)
    assert content.stack == [
        Doing(Kind.PHASE, "step"),
        Doing(Kind.BACKWARD, "stage1.conv0"),
        Doing(Kind.WAIT, "iallreduce", 5),
    ]
    assert content.call == CurrentCall("iallreduce", "all/0.0", 12, -1)
    assert content.lanes == {"loader 0": [Doing(Kind.LOAD, "batch")]}
    activity.called()
    activity.end()
    loader.end()
    after = Slot(memory, 1).read()
    assert len(after.stack) == 2
    assert after.call is None
    assert after.lanes == {"loader 0": []}
    assert after.moves > content.moves
    assert Slot(memory, 0).read().pid == Slot(memory, 2).read().pid == 0


def test_activities_that_are_nested_too_deeply_end_in_order(memory):
    slot = written(memory)
    activity = CurrentActivity(slot)
    for level in range(DEEPEST + 5):
        activity.begin(Kind.PHASE, f"level {level}")
    assert [one.name for one in slot.read().stack] == [f"level {n}" for n in range(DEEPEST)]
    for _ in range(DEEPEST + 4):
        activity.end()
    assert [one.name for one in slot.read().stack] == ["level 0"]


def test_names_and_lanes_beyond_the_room_for_them_do_no_harm(memory):
    slot = written(memory)
    activity = CurrentActivity(slot)
    for number in range(MAX_NAMES + 3):
        activity.begin(Kind.FORWARD, f"layer {number}, with a name that is é" + "long" * 20)
        activity.end()
    activity.begin(Kind.PHASE, "one more name")
    assert [one.name for one in slot.read().stack] == ["?"]
    lanes = [activity.lane(f"loader {number}") for number in range(MOST_LANES + 2)]
    for lane in lanes:
        lane.begin(Kind.LOAD, "batch")
        lane.end()
    assert len(slot.read().lanes) <= MOST_LANES
    assert Slot(memory, 2).read().stack == []


def test_the_stack_is_shown_for_one_request(memory):
    slot = written(memory)
    assert slot.shown(1) is None
    slot.show(1, "MainThread: é\n" * 10000)
    text = slot.shown(1)
    assert text is not None
    assert text.startswith("MainThread: é\n")
    assert slot.shown(2) is None
