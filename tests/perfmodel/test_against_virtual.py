"""The closed forms against the program itself on virtual ranks."""

from typing import Any

import pytest

from pydtnn.models import create_net
from pydtnn.perfmodel.compute import AnalyticCosts
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.prediction import predict
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.strategy import Strategy
from pydtnn.perfmodel.task import Task
from pydtnn.perfmodel.workload import Workload

INPUT, BATCH = (16, 16, 3), 32
PLATFORM = Platform.load("cpu-10gbit")
COSTS = AnalyticCosts(PLATFORM)
PROJECTOR = Projector(
    Task(create_net("resnet20", 10, INPUT), INPUT, "resnet20", BATCH), PLATFORM, COSTS
)


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
    options = {} if recompute is None else {"recompute": recompute}
    virtual = predict(
        Workload("resnet20", INPUT, batch=BATCH, axes=axes, scheme=scheme, options=options),
        PLATFORM,
        COSTS,
        loader_threads=0,
    )
    step = PROJECTOR.project(Strategy(axes, scheme=scheme, recompute=recompute)).step
    # ranks are followed one by one there, and assumed to be alike here
    assert step.seconds == pytest.approx(virtual.seconds, rel=0.08)
