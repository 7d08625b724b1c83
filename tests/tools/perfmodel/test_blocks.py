"""Networks of many equal blocks are outlined as if all blocks had been."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pydtnn.models.gpt import gpt
from pydtnn.tools.perfmodel import blocks
from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload

DEPTH = 12
"""Blocks."""


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST", 6)


PLATFORM = Platform.load("cpu-100gbit")

WORK = Workload(
    partial(gpt, depth=DEPTH, heads=4, width=1024, tied=False), (32,), classes=500, batch=16
)


def projector(work: Workload = WORK, *, whole: bool = False) -> Projector:
    found = Projector(work, PLATFORM, AnalyticCosts.of(work, PLATFORM))
    if whole:
        found.blocks.count = 0
    return found


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 4},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.long),
        pytest.param({"context": 2, "data": 2}, marks=pytest.mark.long),
        pytest.param({"data": 2, "pipeline": 4}, marks=pytest.mark.long),
        pytest.param({"pipeline": 2, "data": 2, "filter": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_network_of_which_one_block_is_repeated_is_predicted_as_the_whole_one(
    axes: dict[str, int],
) -> None:
    short, long = projector(), projector(whole=True)
    schemes = ("allreduce", "sharded", "sharded_parameters")[: 3 if "data" in axes else 1]
    exact = not {"tensor", "pipeline", "filter"}.intersection(axes)
    for scheme in schemes:
        work = replace(WORK, axes=axes, scheme=scheme)
        one, other = short.project(work), long.project(work)
        # buckets of other groups do not repeat with each block, and stages begin within blocks
        limit = 1e-12 if exact else 6e-2
        assert one.seconds == pytest.approx(other.seconds, rel=limit)
        assert one.memory.total == pytest.approx(other.memory.total, rel=limit)
        assert one.state == pytest.approx(other.state, rel=1e-12 if exact else 1e-2)
        assert len(one.step.layers) < len(other.step.layers) or "pipeline" in axes
    assert max(len(step.model.layers) for step in short._steps.values()) < 60


def test_blocks_that_differ_or_are_few_are_all_outlined() -> None:
    few = partial(gpt, depth=blocks.MOST, heads=4, width=64, tied=False)
    for model in ("mlp", few):
        work: Any = replace(WORK, model=model, input_shape=(32,))
        assert projector(work).blocks.shorter(work, 0) is None
    named = replace(WORK, recompute=("block3",))
    assert projector().blocks.shorter(named, 0) is None
    assert projector().blocks.shorter(replace(WORK, axes={"pipeline": 6}), 0) is None


def test_stages_have_equally_many_blocks_or_one_more_in_the_middle() -> None:
    net = partial(gpt, depth=14, heads=4, width=64, tied=False)
    work = replace(WORK, model=net, axes={"pipeline": 4})
    found = [projector(work).blocks.shorter(work, stage) for stage in range(4)]
    assert [one.times for one in found if one] == [0, 1, 1, 0]
    assert sum(one.times + 3 for one in found if one) == 14
    assert [one.stage for one in found if one] == [0, 1, 1, 2]
