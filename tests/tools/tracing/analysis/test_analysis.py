"""Runs whose times are known: every number follows from the durations in `synthetic`."""

from itertools import pairwise

import numpy as np
import pytest

from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis import (
    CriticalPaths,
    compare,
    efficiency,
    find_blocks,
    label,
    layer_times,
    operation_times,
    phase_times,
    rates,
    slow_ranks,
    traffic,
    usage,
    waits,
)
from pydtnn.tools.tracing.analysis.efficiency import replay
from pydtnn.tools.tracing.analysis.times import Machine
from pydtnn.tools.tracing.summary import describe_changes, summarize
from pydtnn.utils.observer import Kind
from tests.tools.tracing.synthetic import LAYERS, MS, nothing, write_run

COMPUTE = 20.7e-3  # s per step: data, layers, loss, two updates
TOLERANCE = 1e-6  # s: clocks are rounded to ns, and steps begin 0.1 ms apart


@pytest.fixture
def run(tmp_path):
    """Write a run and load it."""

    def load(slower=nothing, name="trace", **options):
        write_run(tmp_path / name, slower=slower, **options)
        return load_timeline(tmp_path / name)

    return load


def slow(which, activity, extra):
    return lambda rank, epoch, step, name: extra if (rank, name) == (which, activity) else 0


def test_layers_phases_and_operations_have_their_times(run):
    timeline = run(steps=3)
    layers = {(time.kind, time.name): time for time in layer_times(timeline)}
    for name, (forward, backward) in LAYERS.items():
        for kind, duration in ((Kind.FORWARD, forward), (Kind.BACKWARD, backward)):
            time = layers[kind, name]
            assert time.calls == 12
            assert time.total == pytest.approx(12 * duration / 1e9, abs=TOLERANCE)
            assert time.median == pytest.approx(duration / 1e9, abs=TOLERANCE)
    phases = {time.name: time for time in phase_times(timeline, rank=1)}
    assert phases["data"].calls == 3
    assert phases["forward"].total == pytest.approx(3 * 6e-3, abs=TOLERANCE)
    assert phases["forward"].own == pytest.approx(0, abs=TOLERANCE)
    calls = {(time.kind, time.name): time for time in operation_times(timeline)}
    assert calls[Kind.CALL, "iallreduce"].nbytes == 3 * 4 * 2 * 3000


def test_time_is_compute_communication_or_waiting(run):
    timeline = run(slow(2, "conv1 backward", 8 * MS), steps=4)
    found = usage(timeline)
    for rank, one in enumerate(found):
        extra = 8e-3 * (rank == 2)
        assert one.compute == pytest.approx(4 * (COMPUTE + extra), abs=TOLERANCE)
        steps = timeline.steps
        total = (steps.stop - steps.start)[:, rank].sum() / 1e9
        assert one.total == pytest.approx(total, abs=TOLERANCE)
    assert found[2].waiting < 1e-3 < 4 * 7e-3 < found[0].waiting
    every = label(timeline).seconds(timeline).sum(axis=(0, 1))
    np.testing.assert_allclose(every, [one.total for one in found], rtol=1e-3)


def test_the_bytes_that_ranks_send_to_each_other(run):
    nbytes, count = traffic(run(steps=3))
    expected = 3 * 2 * 2 * np.roll(np.eye(4, dtype=int), 1, axis=1)  # steps, buckets, rounds
    np.testing.assert_array_equal(count, expected)
    np.testing.assert_array_equal(nbytes, 1500 * expected)


def test_rates_are_operations_over_time(run):
    found = {(rate.name, rate.kind): rate for rate in rates(run())}
    forward = found["conv1", Kind.FORWARD]
    assert forward.flops == 2 * LAYERS["conv1"][0]
    assert forward.flops_per_second == pytest.approx(2e9, rel=1e-3)
    assert forward.bytes_per_second == pytest.approx(1e9, rel=1e-3)
    assert forward.intensity == 2
    assert Machine(1e9, 2e9).limit(forward) == forward.flops / 1e9  # more than those of its bytes
    assert Machine(1e9, 1e8).limit(forward) == forward.nbytes / 1e8


def test_a_rate_above_the_peak_is_explained(run):
    timeline = run()
    facts = {"flops_per_second": 1e9, "bytes_per_second": 1e12}  # conv1 has twice these operations
    timeline.about[0]["machine"] = facts
    assert any("above 100 % of peak: Winograd" in line for line in summarize(timeline))
    timeline.about[0]["machine"] = facts | {"flops_per_second": 1e12}
    assert not any("Winograd" in line for line in summarize(timeline))


@pytest.mark.parametrize("messages", [True, False])
def test_efficiencies_of_a_run_with_a_slow_rank(run, messages):
    """Transfer costs two rounds for each of two buckets, or one message, and two calls."""
    found = efficiency(run(name="balanced", steps=20, messages=messages))
    calls = 2 * 10e-6 + (4 if messages else 2) * 0.1e-3
    assert found.load_balance == pytest.approx(1, abs=1e-3)
    assert found.serialisation == pytest.approx(1, abs=2e-3)
    assert found.transfer == pytest.approx(COMPUTE / (COMPUTE + calls), abs=2e-3)
    found = efficiency(run(slow(1, "data", 10 * MS), steps=20, messages=messages))
    balance = (COMPUTE + 10e-3 / 4) / (COMPUTE + 10e-3)
    assert found.load_balance == pytest.approx(balance, abs=1e-3)
    assert found.serialisation == pytest.approx(1, abs=5e-3)
    product = found.load_balance * found.serialisation * found.transfer
    assert found.parallel == pytest.approx(product)


def test_of_a_call_that_began_before_the_part_the_rest_takes_no_time(run):
    timeline = run(ranks=1)
    blocks = find_blocks(timeline)
    start, stop = (blocks.start[:1] + blocks.stop[:1]) // 2, timeline.steps.stop[-1]
    inside = np.clip(blocks.stop, start, stop) - np.clip(blocks.start, start, stop)
    assert inside[0] == 5_000
    assert replay(timeline, blocks, start, stop) == stop - inside.sum()


def test_a_wait_that_begins_with_the_part_ends_when_the_last_rank_has_begun(run):
    timeline = run(slow(1, "data", 10 * MS), ranks=2, messages=False, skew=False)
    blocks = find_blocks(timeline)
    waits = [np.flatnonzero((blocks.rank == rank) & ~blocks.starting)[0] for rank in (0, 1)]
    start, stop = blocks.start[waits], blocks.stop[waits] + 1000
    assert start[1] > start[0]
    np.testing.assert_array_equal(replay(timeline, blocks, start, stop), start[1] + 1000)


@pytest.mark.parametrize("messages", [True, False])
def test_a_callback_is_part_of_the_steps_in_all_tables(run, messages):
    """A callback of rank 0 between two steps: efficiencies, usage and labels agree about it."""
    timeline = run(slow(0, "callback", 10 * MS), steps=20, messages=messages)
    assert (Kind.PHASE, "epoch") not in label(timeline).table
    found = efficiency(timeline)
    compute = [one.compute for one in usage(timeline)]
    np.testing.assert_allclose(found.useful, compute, rtol=1e-9)
    # The first step that is recorded begins with the wait for its batch.
    late = COMPUTE + 10e-3 * 19 / 20
    assert found.useful[0] == pytest.approx(20 * late, abs=TOLERANCE)
    assert found.load_balance == pytest.approx((3 * COMPUTE + late) / 4 / late, abs=1e-3)
    assert waits(timeline)[1:].sum(axis=0).argmax() == 0 or messages  # a ring: the neighbour
    paths = CriticalPaths(timeline)
    late_parts = [paths.find(step).late for step in range(1, 20)]
    assert {(part.rank, part.name) for part in late_parts} == {(0, "callback Late")}


@pytest.mark.parametrize("messages", [True, False])
def test_ranks_that_are_slow_in_turn_serialise(run, messages):
    """All ranks have equal loads, but in each step another one is late."""

    def turn(rank, epoch, step, activity):
        return 20 * MS if activity == "fc forward" and step % 4 == rank else 0

    found = efficiency(run(turn, steps=20, messages=messages))
    assert found.load_balance == pytest.approx(1, abs=1e-3)
    expected = (COMPUTE + 5e-3) / (COMPUTE + 20e-3)
    assert found.serialisation == pytest.approx(expected, abs=5e-3)
    assert found.transfer > 0.98


@pytest.mark.parametrize("messages", [True, False])
def test_the_critical_path_names_the_rank_and_the_layer(run, messages):
    timeline = run(slow(2, "conv2 forward", 9 * MS), steps=4, messages=messages)
    paths = CriticalPaths(timeline, find_blocks(timeline))
    for step in range(1, 4):
        path = paths.find(step)
        assert (path.late.rank, path.late.kind, path.late.name) == (2, Kind.FORWARD, "conv2")
        assert path.late.excess == pytest.approx(9e-3, abs=TOLERANCE)
        assert sum(part.seconds for part in path.parts) == pytest.approx(path.seconds)
        moments = [(segment.start, segment.stop) for segment in path.segments]
        assert all(a[1] == b[0] for a, b in pairwise(moments))


@pytest.mark.parametrize(
    ("activity", "kind", "name"),
    [
        ("data", Kind.PHASE, "data"),
        ("conv2 backward", Kind.BACKWARD, "conv2"),
        ("conv2 forward", Kind.FORWARD, "conv2"),
        ("update", Kind.PHASE, "update"),
        ("callback", Kind.PHASE, "callback Late"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_rank_is_named_with_its_phase_or_layer(run, activity, kind, name, ranks):
    found = slow_ranks(run(slow(1, activity, 7 * MS), ranks=ranks, noise=0.1, steps=12))
    assert (found[0].rank, found[0].kind, found[0].name) == (1, kind, name)
    times = 1 + (activity == "update")
    assert found[0].excess == pytest.approx(times * 7e-3, rel=0.1)
    assert all(one.excess < 0.2 * found[0].excess for one in found[1:])


def test_no_rank_is_named_if_all_are_alike_or_now_and_then_interrupted_or_in_two_steps(run):
    """In three of five steps a layer takes much longer, each time on rank 1."""

    def interrupted(rank, epoch, step, activity):
        return 20 * MS if (rank, activity) == (1, "conv1 forward") and step % 5 > 1 else 0

    assert slow_ranks(run(interrupted, steps=20)) == []
    assert slow_ranks(run(name="alike", noise=0.1, steps=20)) == []
    assert slow_ranks(run(slow(1, "data", 7 * MS), "two", steps=2)) == []
    assert slow_ranks(run(slow(1, "data", 7 * MS), "three", steps=3))[0].rank == 1
    timeline = run(name="serial", ranks=1, steps=2)
    assert slow_ranks(timeline) == []
    path = CriticalPaths(timeline).find(1)
    assert (path.seconds, path.late) == (pytest.approx(timeline.steps.duration / 1e9), None)


def test_two_runs_are_compared_by_their_greatest_change(run):
    before = run(steps=10, noise=0.1)
    every = {"conv2 forward": 4 * MS, "update": MS}
    after = run(lambda *where: every.get(where[-1], 0), "after", steps=10, noise=0.1)
    changes = compare(before, after)
    assert [(change.kind, change.name) for change in changes[:2]] == [
        (Kind.FORWARD, "conv2"),
        (Kind.PHASE, "update"),
    ]
    assert changes[0].difference == pytest.approx(4e-3, abs=0.2e-3)
    assert all(change.significant for change in changes[:2])
    assert not any(change.significant for change in compare(before, before))
    without = run(lambda *where: -MS // 2 if where[-1] == "update" else 0, "without", steps=10)
    (gone,) = (one for one in compare(before, without) if one.name == "update")
    assert (gone.before, gone.after) == (pytest.approx(1e-3, rel=0.1), 0)


def test_no_difference_of_a_few_steps_is_above_the_noise(run):
    empty, before = run(name="empty", steps=0), run(steps=4)
    assert (usage(empty), efficiency(empty)) == ([], None)
    with pytest.raises(ValueError, match="the first trace has no complete training step"):
        compare(empty, before)
    after = run(lambda *where: MS if where[-1] == "update" else 0, "after", steps=4)
    (change, *_) = compare(before, after)
    assert change.name == "update"
    assert change.difference == pytest.approx(2e-3)  # in every phase
    assert not change.significant
    lines = describe_changes(before, after)
    (row,) = [line for line in lines if "update" in line]
    assert "+2.000 ms  below 5 steps" in row
