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
WORK = Workload("resnet20", INPUT, batch=BATCH)


def platform_of(per_host: int, cores: int, **given: Any) -> Platform:
    found = Platform.load("cpu-10gbit")
    cluster = replace(found.cluster, ranks_per_host=per_host, cores_per_host=cores)
    compute = replace(found.compute, threads=1)
    messages = replace(found.messages, **given)
    return replace(found, cluster=cluster, compute=compute, messages=messages)


PLATFORMS = {
    "a rank on each host": platform_of(1, 1),
    "hosts of 2 ranks": platform_of(2, 2, allreduce=2e9),
    "a host": platform_of(4, 4, allreduce=2e9),
    "a host with shared cores": platform_of(4, 2, allreduce=2e9, call=1e-6),
}
PROJECTOR = Projector(WORK, PLATFORMS["a host"], AnalyticCosts(PLATFORMS["a host"]))

CASES: list[dict[str, Any]] = [
    {},
    {"axes": {"data": 2}},
    {"axes": {"data": 4}},
    {"axes": {"data": 4}, "scheme": "sharded"},
    {"axes": {"data": 4}, "optimizer": "adam", "optimizer_options": {}},
    {"axes": {"data": 2}, "recompute": 3},
    {"axes": {"data": 1, "filter": 2}},
    {"axes": {"data": 1, "channel": 2}},
    {"axes": {"data": 1, "spatial": 2}},
    {"axes": {"data": 2, "spatial": 2}},
    {"axes": {"data": 2, "filter": 2}},
    {"axes": {"data": 1, "pipeline": 2}},
]

SHARED = ("hosts of 2 ranks", {"axes": {"data": 2, "spatial": 2}})
"""Sums between hosts are in progress while layers wait for messages inside a host, which the closed
formulas take to share a link."""


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", PLATFORMS)
def test_a_step_takes_as_long_as_on_virtual_ranks(name: str, case: dict[str, Any]) -> None:
    platform, work = PLATFORMS[name], replace(WORK, **case)
    costs = AnalyticCosts.of(work, platform)
    virtual = predict(work, platform, costs)
    closed = PROJECTOR.with_platform(platform, costs).project(work)
    # ranks are followed one by one there, and assumed to be alike here
    limit = 0.12 if (name, case) == SHARED else 0.06
    assert closed.step.seconds == pytest.approx(virtual.step.seconds, rel=limit)
    assert closed.memory.total == pytest.approx(virtual.memory.total, rel=0.05)  # buffers of sums
    assert closed.loader == pytest.approx(virtual.loader)
