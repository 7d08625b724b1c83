"""The closed forms against the program itself on virtual ranks."""

from dataclasses import replace
from typing import Any

import pytest

from pydtnn.perfmodel.compute import AnalyticCosts
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.virtual.steps import predict
from pydtnn.perfmodel.workload import Workload

INPUT, BATCH = (16, 16, 3), 32
PLATFORM = Platform.load("cpu-10gbit")
COSTS = AnalyticCosts(PLATFORM)
WORK = Workload("resnet20", INPUT, batch=BATCH)
PROJECTOR = Projector(WORK, PLATFORM, COSTS)


@pytest.mark.parametrize(
    ("axes", "scheme", "recompute"),
    [
        ({}, "allreduce", None),
        ({"data": 2}, "allreduce", None),
        ({"data": 4}, "allreduce", None),
        ({"data": 4}, "sharded", None),
        ({"data": 2}, "allreduce", 3),
        ({"data": 1, "filter": 2}, "allreduce", None),
        ({"data": 1, "channel": 2}, "allreduce", None),
        ({"data": 1, "spatial": 2}, "allreduce", None),
        ({"data": 2, "spatial": 2}, "allreduce", None),
        ({"data": 1, "pipeline": 2}, "allreduce", None),
    ],
)
def test_a_step_takes_as_long_as_on_virtual_ranks(
    axes: dict[str, int], scheme: str, recompute: Any
) -> None:
    work = replace(WORK, axes=axes, scheme=scheme, recompute=recompute)
    virtual, step = predict(work, PLATFORM, COSTS), PROJECTOR.project(work).step
    # ranks are followed one by one there, and assumed to be alike here
    assert step.seconds == pytest.approx(virtual.seconds - virtual.loader, rel=0.08)
