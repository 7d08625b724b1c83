"""Steps of pipelines on virtual ranks: their bubbles are those of the formulas of papers."""

from __future__ import annotations

from functools import partial

import pytest

from pydtnn.comm.schedules.network import Network
from pydtnn.layers import Linear, Sequential
from pydtnn.perfmodel.virtual import run_virtual
from pydtnn.perfmodel.virtual.steps import _program
from pydtnn.perfmodel.workload import Workload
from tests.perfmodel.virtual.costs import SECONDS, UniformCosts


def equal_stages(stages: int, classes: int, shape: tuple[int, ...]) -> Sequential:
    return Sequential(*(Linear(classes, name=f"layer{i}") for i in range(stages)))


def seconds_of_a_step(stages: int, micro_batches: int, schedule: str) -> float:
    """Execute steps of a sample per micro-batch on ranks whose messages take no time."""
    net = partial(equal_stages, stages)
    net.__name__ = "equal_stages"  # type: ignore[attr-defined]
    work = Workload(
        net,
        (8,),
        8,
        micro_batches,
        {"pipeline": stages},
        plan={"pipeline": [f"layer{i}" for i in range(1, stages)]},
        micro_batches=micro_batches,
        pipeline_schedule=schedule,
    )
    fast = {"latency": 1e-9, "bandwidth": 1e15, "local_latency": 1e-9, "local_bandwidth": 1e15}
    network = Network.create([0] * stages, **fast)
    ends = run_virtual(_program(work, 1), network=network, costs=UniformCosts()).results[0].ends
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("stages", [4, 8, pytest.param(16, marks=pytest.mark.long)])
def test_bubbles_are_those_of_the_formulas(stages: int) -> None:
    forward, half = SECONDS["forward"], SECONDS["backward"] / 2
    micro_batches = 3 * stages
    work = micro_batches * (forward + 2 * half)
    bubbles = {
        name: seconds_of_a_step(stages, micro_batches, name) - work for name in ("1f1b", "zb_h1")
    }
    assert bubbles["1f1b"] == pytest.approx((stages - 1) * (forward + 2 * half), rel=0.02)
    assert bubbles["zb_h1"] == pytest.approx((stages - 1) * forward, rel=0.02)
    assert bubbles["zb_h1"] < 0.4 * bubbles["1f1b"]
