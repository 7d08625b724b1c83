"""Steps of pipelines on virtual ranks: their bubbles are those of the formulas of papers."""

from __future__ import annotations

from functools import partial

import pytest

from pydtnn.layers import Linear, Sequential
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual import Processor, steps
from pydtnn.training.workload import Workload
from tests.each import each
from tests.tools.perfmodel.virtual.costs import SECONDS, UniformCosts


@pytest.fixture(autouse=True)
def one_pair_of_steps(monkeypatch):
    monkeypatch.setattr(steps, "STEPS", 2)


def equal_stages(stages: int, classes: int, shape: tuple[int, ...]) -> Sequential:
    return Sequential(*(Linear(classes, name=f"layer{i}") for i in range(stages)))


def seconds_of_a_step(ranks: int, micro_batches: int, schedule: str, chunks: int = 1) -> float:
    """Execute steps of a sample per micro-batch on ranks whose messages take no time."""
    stages = chunks * ranks
    net = partial(equal_stages, stages)
    net.__name__ = "equal_stages"  # type: ignore[attr-defined]
    work = Workload(
        net,
        (8,),
        8,
        micro_batches,
        {"pipeline": ranks},
        plan={"pipeline": [f"layer{i}" for i in range(1, stages)]},
        micro_batches=micro_batches,
        pipeline_schedule=schedule,
    )
    fast = {"latency": 1e-9, "bandwidth": 1e15, "local_latency": 1e-9, "local_bandwidth": 1e15}
    network = Network.create([0] * ranks, **fast)
    return steps.simulate(work, network, UniformCosts(), Processor())[0].step.seconds


@each("ranks", [4, 8])
def test_pipelines_in_two_directions_wait_as_long_as_in_the_paper(ranks):
    """Li and Hoefler, SC 2021, section 3.1: as many micro-batches as ranks, backward of twice the
    time of forward."""
    forward = SECONDS["forward"]
    seconds = seconds_of_a_step(ranks, ranks, "chimera")
    idle = seconds - 3 * forward * ranks
    assert idle == pytest.approx(2 * (ranks - 2) * forward, rel=0.02)
    assert idle < 0.6 * (seconds_of_a_step(ranks, ranks, "1f1b") - 3 * forward * ranks)


CHUNKS = {"1f1b": 1, "zb_h1": 1, "interleaved": 2, "interleaved:3": 3, "zb_v": 2, "dualpipe": 1}
"""Stages per rank of each schedule."""


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
def test_bubbles_are_those_of_the_formulas(ranks):
    forward, half = SECONDS["forward"], SECONDS["backward"] / 2
    micro_batches, stage = 3 * ranks, forward + 2 * half
    bubbles = {}  # in stages of a rank's whole work
    for name, chunks in CHUNKS.items():
        seconds = seconds_of_a_step(ranks, micro_batches, name, chunks)
        bubbles[name] = (seconds - micro_batches * chunks * stage) / chunks
    assert bubbles["1f1b"] == pytest.approx((ranks - 1) * stage, rel=0.02)
    assert bubbles["interleaved"] == pytest.approx((ranks - 1) * stage / 2, rel=0.02)
    assert bubbles["interleaved:3"] == pytest.approx((ranks - 1) * stage / 3, rel=0.02)
    assert bubbles["interleaved"] < 0.55 * bubbles["1f1b"]
    assert bubbles["zb_h1"] == pytest.approx((ranks - 1) * forward, rel=0.02)
    assert bubbles["zb_h1"] < 0.4 * bubbles["1f1b"]
    assert bubbles["zb_v"] == pytest.approx((ranks - 1) * forward / 2, rel=0.02)
    assert bubbles["dualpipe"] == pytest.approx((ranks / 2 - 1) * forward, rel=0.02)
    assert bubbles["zb_v"] < 0.2 * bubbles["1f1b"]
