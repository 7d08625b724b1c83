"""Steps that are only timed: one rank stands for all, or all are executed."""

from __future__ import annotations

import pytest

from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.tools.perfmodel.virtual.disturbances import Disturbances, Straggler
from pydtnn.tools.perfmodel.virtual.steps import _program, time_steps
from pydtnn.training.workload import Workload
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts

PLATFORM = Platform.load("cpu-1gbit")


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


def test_steps_with_a_slow_rank_are_those_of_one_that_stands_for_all():
    slow = Disturbances(stragglers=(Straggler(1, 3.0),))
    timing = time_steps(workload(2), PLATFORM, UniformCosts(), disturbances=slow)
    assert timing.alike
    assert timing.seconds > time_steps(workload(2), PLATFORM, UniformCosts()).seconds
