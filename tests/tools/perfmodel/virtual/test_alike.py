"""Ranks that are alike: two of each kind are executed, and take the times of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.tools.perfmodel.compute.base import NoCosts
from pydtnn.tools.perfmodel.engine.engine import Engine
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual import run_virtual, steps
from pydtnn.training.workload import Workload
from pydtnn.utils import clock
from tests.each import each

ALGORITHMS = ("rule", "vendor", "ring", "hierarchical", "torus", "direct", "bidirectional_ring")


def sums(algorithm: str, ranks: int, per_host: int, length: int, alike: int | None) -> list[float]:
    """Return when ranks end that sum two arrays at the same time, twice."""
    hosts = [rank // per_host for rank in range(ranks)]
    network = Network.create(hosts, latency=5e-5, bandwidth=1e8, memory=8e9, add=1e-10)

    def program(comm: Communicator) -> float:
        scheduled = create_allreduce(algorithm, comm)
        scheduled.split_by_host().barrier()
        for _ in range(2):
            both = [scheduled.iallreduce(np.zeros(length, "float32")) for _ in range(2)]
            for request in both:
                request.wait()
        return clock.now()

    return run_virtual(program, network=network, costs=NoCosts(), alike=alike).results


def predicted(monkeypatch: Any, work: Workload, platform: str, *, alike: bool) -> list[Any]:
    """Return the step and memory of ranks, all of them or one of each kind."""
    monkeypatch.setattr(steps, "MAX_RANKS", work.ranks - alike)
    found = steps.predict(work, platform).ranks
    return [(one.step, one.memory) for one in found]


@each("ranks, per_host, algorithm", [(8, 2, "rule"), (7, 1, "ring"), (8, 1, "torus")])
def test_sums_of_ranks_that_are_alike_take_the_same_time_to_the_bit(ranks, per_host, algorithm):
    everyone = sums(algorithm, ranks, per_host, ranks * 4096, None)
    assert sums(algorithm, ranks, per_host, ranks * 4096, per_host) == everyone[:per_host]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "per_host"), [(16, 4), (32, 8), (13, 1)])
@each("algorithm", ALGORITHMS)
def test_sums_of_many_ranks_that_are_alike_take_the_same_time(algorithm, ranks, per_host):
    everyone = sums(algorithm, ranks, per_host, ranks * 1024, None)
    assert sums(algorithm, ranks, per_host, ranks * 1024, per_host) == everyone[:per_host]


@pytest.mark.long
def test_a_step_of_64_ranks_which_arrays_are_not_divided_by_changes_by_little(monkeypatch):
    work = Workload("resnet8", (16, 16, 3), batch=512, axes={"data": 64})
    times = (
        max(step.seconds for step, _ in predicted(monkeypatch, work, "cpu-1gbit", alike=alike))
        for alike in (True, False)
    )
    assert next(times) == pytest.approx(next(times), rel=1e-3)


@pytest.mark.long
@each("algorithm", ["hierarchical", "ring"])
def test_parts_that_differ_by_an_element_change_the_time_by_little(algorithm):
    times = (max(sums(algorithm, 13, 1, 100_003, alike)) for alike in (1, None))
    assert next(times) == pytest.approx(next(times), rel=1e-3)


CASES: list[dict[str, Any]] = [
    {"axes": {"data": 4, "filter": 2}},
    {"axes": {"data": 8}, "scheme": "sharded"},
    {"axes": {"data": 4, "pipeline": 4}},
    {"axes": {"data": 4, "filter": 2, "spatial": 2}},
    {"axes": {"data": 16}, "scheme": "gossip"},
]


@pytest.mark.parametrize(
    ("case", "platform"),
    [
        ({"axes": {"data": 4}}, "cpu-10gbit"),
        *(pytest.param(one, "cpu-10gbit", marks=pytest.mark.long) for one in CASES),
        *(pytest.param(one, "abci", marks=pytest.mark.long) for one in CASES),
    ],
)
def test_steps_of_ranks_that_are_alike_are_those_of_all_ranks(case, platform, monkeypatch):
    work = Workload("resnet8", (16, 16, 3), batch=8 * case["axes"]["data"], **case)
    own = predicted(monkeypatch, work, platform, alike=True)
    assert own == predicted(monkeypatch, work, platform, alike=False)[: len(own)]


def test_the_work_for_4096_ranks_grows_with_the_rounds_only(monkeypatch):
    counts, post = [0], Engine._post

    def counted(self: Engine, *args: Any) -> None:
        counts[-1] += 1
        post(self, *args)

    monkeypatch.setattr(Engine, "_post", counted)
    for ranks in (32, 4096):
        counts.append(0)
        work = Workload("mlp", (16, 16, 3), batch=ranks, axes={"data": ranks})
        assert len(steps.predict(work, "cpu-1gbit").ranks) == 1
    assert 0 < counts[2] <= 12 / 5 * counts[1]


@each(
    "options, reason",
    [
        ({"axes": {"pipeline": 4, "data": 8}}, "kinds of ranks that repeat"),
        ({"axes": {"data": 2, "filter": 32}}, "kinds of ranks that repeat"),
        ({"axes": {"data": 31}}, "kinds of ranks that repeat"),  # of a batch of 64
        ({"axes": {"data": 64}, "allreduce": "binomial_tree"}, "the ranks are not alike"),
    ],
)
def test_more_ranks_that_are_not_alike_are_refused_in_one_sentence(options, reason):
    with pytest.raises(ValueError, match=reason):
        steps.predict(Workload("mlp", (8, 8, 3), batch=64, **options), "cpu-1gbit")
