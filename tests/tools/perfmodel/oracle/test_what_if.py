from dataclasses import replace

import pytest

from pydtnn.tools.perfmodel.oracle import Oracle, sweep
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from tests.tools.perfmodel.costs import PerFlop

WORK = Workload("resnet20", (8, 8, 3), batch=64, samples=1000)


class PerPeak(PerFlop):
    def on(self, platform: Platform) -> PerFlop:
        return PerPeak(rate=platform.compute.peak["float32"] / 100)


@pytest.fixture(scope="module")
def projector() -> Projector:
    platform = Platform.load("cpu-1gbit")
    return Projector(WORK, platform, PerPeak().on(platform))


def times(projector: Projector, axis: str) -> list[float]:
    found = sweep(axis, Oracle(projector), [replace(WORK, axes={"data": 4})])
    (entries,) = found.entries.values()
    assert len(entries) == len(found.values)
    return [entry.projection.seconds for entry in entries if entry.projection]


@pytest.mark.parametrize("axis", ["flops", "memory", "bandwidth", "batch"])
def test_a_better_machine_is_never_slower_and_a_larger_batch_never_faster(projector, axis):
    seconds = times(projector, axis)
    assert seconds == sorted(seconds, reverse=axis != "batch")
    assert seconds[0] != seconds[-1]


def test_values_are_those_that_are_given_and_a_batch_is_that_of_each_rank_if_it_is_so(projector):
    works = [replace(WORK, axes={"data": 2, "filter": 2})]
    found = sweep("batch", Oracle(projector, per_rank=4), works, [8, 16])
    ((first, second),) = found.entries.values()
    assert found.values == (8, 16)
    assert (first.work.batch, second.work.batch) == (32, 64)
    more = sweep("ranks", Oracle(projector), works, [8, 5])
    ((larger, odd),) = more.entries.values()
    assert larger.work.axes == {"data": 4, "filter": 2}
    assert odd.reason == "expected a multiple of 2 ranks, got 5"
    assert [*more.entries] == ["data x filter 2"]


def test_unknown_axes_are_refused(projector):
    with pytest.raises(ValueError, match="batch"):
        sweep("bach", Oracle(projector), [])
