"""The clock of a rank, and what it asks of the costs."""

from __future__ import annotations

import pytest

from pydtnn.comm import Communicator
from pydtnn.layers import ReLU
from pydtnn.layers.base import Layer
from pydtnn.tools.perfmodel.compute.base import Label
from pydtnn.tools.perfmodel.prediction import StepTime
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.utils import clock
from pydtnn.utils.observer import Activity, Kind
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


class Counted(UniformCosts):
    def __init__(self, constant: bool) -> None:
        self.constant = constant
        self.asked: list[tuple[Label, Layer | None, int]] = []

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        self.asked.append((label, layer, batch))
        return super().seconds(label, layer, batch)


def passes(comm: Communicator) -> list[float]:
    observer = clock.virtual()
    assert observer is not None
    observer.layers({"conv": ReLU()})
    times = []
    for samples in (4, 4, 2):
        observer.samples(samples)
        begin = clock.now()
        with Activity(observer, Kind.PHASE, "forward"):
            with Activity(observer, Kind.FORWARD, "conv"):
                with Activity(observer, Kind.KERNEL, "conv"):
                    pass
                with Activity(observer, Kind.CALL, "isend"):
                    pass
            with Activity(observer, Kind.BACKWARD, "conv"):
                pass
            with Activity(observer.lane("loader 0"), Kind.FORWARD, "conv"):  # takes no time
                pass
        times.append(clock.now() - begin)
    return times


@each(("constant", "asked"), [(True, 15), (False, 18)])
def test_segments_advance_the_clock_by_their_costs(constant, asked):
    costs = Counted(constant)
    run = run_virtual(passes, network=cluster("a"), costs=costs)
    assert run.results[0] == pytest.approx([12e-3, 12e-3, 6e-3])
    assert len(costs.asked) == asked
    conv = Label("forward", "conv", 1), 2
    assert [(label, batch) for label, layer, batch in costs.asked if layer][-2] == conv


class Phases(UniformCosts):
    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        return {"update": 8.0, "loss": 2.0}.get(label.name, 0.0) if label.index == 0 else 0.0


def test_the_time_of_a_step_has_that_of_the_update_beside_other_phases():
    def step(comm: Communicator) -> StepTime:
        for name in ("update", "loss", "update"):
            with Activity(clock.virtual(), Kind.PHASE, name):
                pass
        return clock.virtual().take(4)

    (found,) = run_virtual(step, network=cluster("a"), costs=Phases()).results
    assert found == StepTime((), other=0.5, update=4.0, gradients_exposed=0.0)
