"""Traces that virtual ranks have recorded, replayed on other networks, against runs on these."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.network import Network
from pydtnn.kernels.dry import dry_backend
from pydtnn.tools.perfmodel import Platform
from pydtnn.tools.perfmodel.replay import Replay, median_step, what_if
from pydtnn.tools.perfmodel.virtual import Processor, run_virtual
from pydtnn.tools.perfmodel.virtual.disturbances import NONE, Disturbances, Straggler
from pydtnn.tools.tracing.analysis import CriticalPaths, efficiency, find_blocks, slow_ranks, usage
from pydtnn.tools.tracing.timeline import Timeline, build_timeline
from pydtnn.training.tracing.recorder import Recorder
from pydtnn.training.tracing.records import RankTrace
from pydtnn.training.tracing.writing import allreduce_of
from pydtnn.training.workload import Workload, WorkloadRank
from pydtnn.utils import clock
from pydtnn.utils.observer import Kind
from tests.tools.perfmodel.costs import PerFlop

STEPS, WARM_UP = 4, 1
FAST, SLOW = "1 Gbit/s", "100 Mbit/s"
RATES = {FAST: 1.25e8, SLOW: 1.25e7}
PROCESSOR, CPU = Processor(call=3e-5), Platform.load("cpu-1gbit")


def network(rate: str, ranks: int) -> Network:
    hosts = [rank // 2 for rank in range(ranks)] if ranks > 2 else range(ranks)
    return Network.create(
        hosts, latency=1e-4, bandwidth=RATES[rate], local_latency=1e-6, local_bandwidth=8e9
    )


def work_of(**options: Any) -> Workload:
    return Workload("resnet8", (8, 8, 3), batch=16, **options)


@cache
def recorded_at(options: str, rate: str) -> Timeline:
    return record(work_of(**ast.literal_eval(options)), rate)


def record(work: Workload, rate: str, disturbances: Disturbances = NONE) -> Timeline:
    """Return the trace of training steps on virtual ranks."""

    def program(comm: Communicator) -> RankTrace:
        recorder = Recorder(clock=clock.current())
        backend = dry_backend(work.create_backend(), threshold=1)
        rank = WorkloadRank(work, comm, backend=backend, observers=[recorder])
        rank.trainer.optimizer.iterations = 1
        for step in range(WARM_UP + STEPS):
            recorder.step(0, step)
            rank.step()
        facts = {"offset": 0, "drift": 0.0, "origin": 0, "error": 0}
        about = {"rank": comm.rank, "size": comm.size, "lanes": recorder.lanes, "clock": facts}
        about["allreduce"] = allreduce_of(rank.trainer.comm)
        return RankTrace(recorder.records(), recorder.names, about)

    ran = run_virtual(
        program,
        network=network(rate, work.ranks),
        costs=PerFlop(rate=1e9),
        processor=PROCESSOR,
        disturbances=disturbances,
    )
    return build_timeline(ran.results)


def seconds(timeline: Timeline, rate: str, **options: Any) -> float:
    found = Replay(timeline).run(network(rate, timeline.size), PROCESSOR, **options)
    return median_step(found[WARM_UP:])


def recorded(timeline: Timeline) -> float:
    return median_step(1e-9 * timeline.steps.stop[WARM_UP:])


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"data": 4}, "scheme": "sharded"},
        {"axes": {"data": 4}, "scheme": "hierarchical"},
        {"axes": {"data": 2}, "compress": "top_k", "compress_options": {"share": 0.1}},
        {"axes": {"pipeline": 2}},
        {"axes": {"spatial": 2}},
        {"axes": {"data": 2, "filter": 2}},
        {"axes": {"data": 4}, "scheme": "gossip"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST), (FAST, FAST)])
def test_a_trace_replayed_on_another_network_takes_as_long_as_a_run_on_it(options, before, after):
    expected = recorded(recorded_at(repr(options), after))
    # Sums progress in tests, of which a trace has those that have completed a message only.
    assert seconds(recorded_at(repr(options), before), after) == pytest.approx(expected, rel=0.05)


def test_a_trace_without_its_slow_rank_takes_as_long_as_a_run_without_one():
    work = work_of(axes={"data": 4})
    disturbed = record(work, FAST, Disturbances(stragglers=(Straggler(2, 2.0),)))
    expected = recorded(record(work, FAST))
    assert recorded(disturbed) > 1.3 * expected
    assert seconds(disturbed, FAST) == pytest.approx(recorded(disturbed), rel=0.02)
    assert seconds(disturbed, FAST, without={2}) == pytest.approx(expected, rel=0.02)
    words = ("recorded", "cpu-1gbit ", "bandwidth x 2", "allreduce ring", "slow rank 2", "all of")
    lines = what_if(disturbed, [CPU], bandwidths=[2.0], allreduces=["ring"], without=())
    assert [word in line for word, line in zip(words, lines[2:], strict=True)] == [True] * 6
    first = slow_ranks(disturbed)[0]
    assert (first.rank, first.kind) == (2, Kind.BACKWARD)
    late = [CriticalPaths(disturbed).find(step).late for step in range(1, WARM_UP + STEPS)]
    assert {part.rank for part in late if part is not None} == {2}
    useful = efficiency(disturbed)
    assert useful is not None
    np.testing.assert_allclose(useful.useful, [one.compute for one in usage(disturbed)])
    sent, blocks = disturbed.messages.sent, find_blocks(disturbed)
    assert (blocks.find(sent["source"], sent["start"]) >= 0).all()


def test_sums_follow_another_algorithm():
    options = {"axes": {"data": 4}, "overlap": False}
    expected = recorded(record(work_of(allreduce="ring", **options), SLOW))
    found = seconds(record(work_of(**options), FAST), SLOW, allreduce="ring")
    assert found == pytest.approx(expected, rel=0.02)
    ring = record(work_of(allreduce="ring", **options), FAST)  # the trace names it
    assert seconds(ring, SLOW) == pytest.approx(expected, rel=0.02)


def test_ranks_that_cannot_be_replaced_and_traces_without_steps_are_refused():
    timeline = record(work_of(axes={"data": 2}), FAST)
    for ranks in ((0, 1), (7,), ()):
        with pytest.raises(ValueError, match="--without"):
            what_if(timeline, [CPU], without=ranks)
    timeline.names.append("replay")
    with pytest.raises(ValueError, match="--device cuda:graph=false"):
        Replay(timeline)
    timeline = record(work_of(axes={"data": 2}), FAST)
    timeline.names[timeline.name_id("step")] = "evaluation"
    with pytest.raises(ValueError, match="training steps"):
        Replay(timeline)


def test_ranks_are_placed_as_they_were_recorded():
    timeline = record(work_of(axes={"data": 4}), FAST)
    for hosts, found in (("abcd", 4), ("aabb", 2), ("abab", 4), ("abba", 4)):
        for host, about in zip(hosts, timeline.about, strict=True):
            about["host"] = host
        assert f"{found} hosts" in what_if(timeline, [CPU])[0]
    assert np.all(np.diff(timeline.steps.stop, axis=0) > 0)
