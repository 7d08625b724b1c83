"""Steps that are only timed: one rank stands for all, or all are executed."""

from __future__ import annotations

from operator import attrgetter

import pytest

from pydtnn.comm.traffic import Traffic
from pydtnn.kernels import create_backend
from pydtnn.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.perfmodel.dry_step import DryStep
from pydtnn.perfmodel.engine.processor import Processor
from pydtnn.perfmodel.outline import Start
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.virtual import run_virtual
from pydtnn.perfmodel.virtual.disturbances import Disturbances, SlowLink, Straggler
from pydtnn.perfmodel.virtual.steps import WARM_UP, _program, predict, time_steps
from pydtnn.perfmodel.workload import Workload
from tests.each import each
from tests.perfmodel.virtual.costs import UniformCosts

PLATFORM = Platform.load("cpu-1gbit")
BACKEND = create_backend("cpu")


def workload(ranks: int, **options: object) -> Workload:
    return Workload("cnn", (12, 12, 1), 10, 4 * ranks, {"data": ranks}, **options)  # type: ignore[arg-type]


@each("ranks", [2, 8])
@each("allreduce", ["rule", "ring", "vendor"])
def test_one_rank_for_all_takes_about_the_time_of_every_one(ranks, allreduce):
    work = workload(ranks, allreduce=allreduce)
    timing = time_steps(work, PLATFORM, UniformCosts())
    run = run_virtual(
        _program(work, 4),
        network=PLATFORM.network(ranks),
        costs=UniformCosts(),
        processor=Processor.of(PLATFORM),
    )
    assert timing.alike
    expected = (run.results[0].ends[-1] - run.results[0].ends[0]) / 4
    assert timing.seconds == pytest.approx(expected, rel=0.05)


def test_many_ranks_are_one_that_is_executed():
    timing = time_steps(workload(256), PLATFORM, UniformCosts())
    assert timing.alike
    assert timing.seconds > time_steps(workload(2), PLATFORM, UniformCosts()).seconds
    assert 0 < timing.efficiency < 1
    alone = time_steps(workload(1), PLATFORM, UniformCosts())
    assert alone.efficiency == pytest.approx(1, rel=0.02)


@each("options", [{"scheme": "gossip"}, {"compress": "topk"}, {"scheme": "hierarchical"}])
def test_ranks_with_messages_of_their_own_are_executed(options):
    assert not time_steps(workload(4, **options), PLATFORM, UniformCosts(), steps=1).alike
    with pytest.raises(ValueError, match="at most 1024 ranks"):
        time_steps(workload(1025, **options), PLATFORM, UniformCosts())


def test_ranks_are_executed_where_links_are_slow_for_a_time():
    slow = Disturbances(slow_links=(SlowLink(0, 1, 100.0, begin=0.0, end=1e-3),))
    assert not time_steps(workload(2), PLATFORM, UniformCosts(), disturbances=slow).alike
    always = Disturbances(slow_links=(SlowLink(0, 1, 100.0),))
    timing = time_steps(workload(2), PLATFORM, UniformCosts(), disturbances=always)
    assert timing.alike
    assert timing.seconds > time_steps(workload(2), PLATFORM, UniformCosts()).seconds


@each("ranks", [4, 128])
def test_a_slow_rank_delays_all(ranks):
    slow = Disturbances((Straggler(1, 3.0),))
    usual, late = (
        time_steps(workload(ranks), PLATFORM, UniformCosts(), disturbances=one).seconds
        for one in (Disturbances(), slow)
    )
    assert late > 2 * usual


@each("axes", [{"data": 2}, {"expert": 2}, {"data": 2, "expert": 2}])
def test_experts_compute_and_send_what_the_formulas_say(axes):
    """Messages counted on virtual ranks, and compute, are those of the outline of a rank."""
    work = Workload("moe_gpt_nano", (16,), 32, 8, axes)
    costs = AnalyticCosts.of(work, PLATFORM)
    closed = Projector(work, PLATFORM, costs).project(work).step
    assert predict(work, PLATFORM, costs).step.compute == pytest.approx(closed.compute)
    starts = [
        event
        for events in attrgetter("forward", "backward")(DryStep(work, BACKEND).outline())
        for event in events
        if isinstance(event, Start) and event.node == "block1.moe.experts"
    ]
    samples, steps = work.samples_per_rank, WARM_UP + 1
    run = run_virtual(
        _program(work, 1),
        network=PLATFORM.network(work.ranks),
        costs=costs,
        processor=Processor.of(PLATFORM),
    )
    for found in run.results:
        sent = found.rank.trainer.model.mesh.traffic.get("block1.moe.experts", Traffic())
        assert sent.messages == steps * sum(start.messages for start in starts)
        assert sent.bytes == steps * sum(start.nbytes.at(samples) for start in starts)
