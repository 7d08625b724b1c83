"""Closed formulas on random platforms: beside virtual ranks, and rules that any model must obey."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pydtnn.perfmodel.compute import AnalyticCosts
from pydtnn.perfmodel.oracle.ranking import Oracle, strategies
from pydtnn.perfmodel.platform import Cluster, Compute, Link, Messages, Platform
from pydtnn.perfmodel.prediction import Prediction
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.topology import Dragonfly, FatTree, Topology, Torus
from pydtnn.perfmodel.virtual.steps import predict
from pydtnn.perfmodel.workload import SHARDED, Workload

NETWORK = Workload("resnet8", (16, 16, 3))
SEQUENCES = Workload("moe_gpt_nano", (32,), 256, model_options={"tied": False, "experts": 4})

PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)

STRATEGIES: list[tuple[Workload, dict[str, Any]]] = [
    *((NETWORK, {"axes": {"data": ranks}}) for ranks in (1, 2, 3, 4, 6, 8)),
    *((NETWORK, {"axes": {"data": 4}, "scheme": scheme}) for scheme in SHARDED),
    *((NETWORK, {"axes": {axis: n}}) for axis in ("filter", "channel", "spatial") for n in (2, 4)),
    *((NETWORK, {"axes": {"data": 2, axis: 2}}) for axis in ("filter", "channel", "spatial")),
    *((NETWORK, {"axes": {"data": 4, axis: 2}}) for axis in ("filter", "spatial")),
    (NETWORK, {"axes": {"data": 2, "spatial": 4}}),
    *(
        (NETWORK, {"axes": {**data, "pipeline": 2}, "pipeline_schedule": schedule})
        for data in ({}, {"data": 2})
        for schedule in ("gpipe", "1f1b", "zb_h1", "zb_v", "chimera")
    ),
    (NETWORK, {"axes": {"pipeline": 4}}),
    (NETWORK, {"axes": {"data": 2}, "recompute": 2}),
    *((SEQUENCES, {"axes": axes}) for axes in ({"tensor": 2}, {"context": 2}, {"expert": 2})),
    *((SEQUENCES, {"axes": {"data": 2, axis: 2}}) for axis in ("tensor", "context", "expert")),
]


def random_topology(rng: np.random.Generator, hosts: int) -> Topology | None:
    """Return switches between at least so many hosts, or none."""
    link: dict[str, Any] = {"hop": 10 ** rng.uniform(-7, -5.5)}
    if rng.random() < 0.5:
        link["bandwidth"] = 10 ** rng.uniform(8.5, 10.5)
    kinds: Sequence[Any] = (
        lambda: None,
        lambda: FatTree(**link, down=(2, hosts), up=(int(rng.integers(1, 3)),)),
        lambda: Dragonfly(**link, groups=hosts, routers=2, per_router=1),
        lambda: Torus(**link, dimensions=(2, max(hosts, 2))),
    )
    found: Topology | None = kinds[rng.integers(len(kinds))]()
    return found


def random_platform(rng: np.random.Generator, ranks: int) -> Platform:
    """Return a platform some of whose optional entries are omitted."""

    def some(value: float, otherwise: Any = None) -> Any:
        return otherwise if rng.random() < 0.5 else value

    def power(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    per_host = int(rng.integers(1, 9))
    hosts = -(-ranks // per_host)
    bandwidth = power(8, 10.5)
    return Platform(
        name="random",
        cluster=Cluster(hosts, per_host, per_host, 64e9),
        compute=Compute(
            threads=1,
            peak={"float32": power(10, 12)},
            memory_bandwidth=power(9.5, 11),
            host_bandwidth=some(power(10.5, 11.5)),
            call=some(power(-6, -4.5), 0.0),
            step=some(power(-5, -3), 0.0),
        ),
        messages=Messages(
            inside=Link(power(-6.5, -5.5), power(9.5, 10.5), some(power(10, 11))),
            between=Link(power(-6, -4.3), bandwidth, some(bandwidth * rng.uniform(1, 4))),
            add=some(power(9.5, 10.5)),
            copy=some(power(9.5, 10.5)),
            call=some(power(-6.5, -4.5), 0.0),
            allreduce=some(power(9, 10)),
            rails=int(rng.integers(1, 3)),
        ),
        topology=random_topology(rng, hosts),
    )


def random_work(rng: np.random.Generator) -> Workload:
    work, given = STRATEGIES[rng.integers(len(STRATEGIES))]
    batch = PRIMES[rng.integers(len(PRIMES))] if rng.random() < 0.7 else int(rng.integers(8, 65))
    return replace(work, batch=batch, **given)


def both(seed: int) -> tuple[Prediction, Prediction]:
    rng = np.random.default_rng(seed)
    work = random_work(rng)
    platform = random_platform(rng, work.ranks)
    costs = AnalyticCosts.of(work, platform)
    return PROJECTORS[work.model].with_platform(platform, costs).project(work), predict(
        work, platform, costs
    )


_ANY = Platform.load("cpu-10gbit")
_ANY = replace(_ANY, compute=replace(_ANY.compute, threads=1))
PROJECTORS = {
    work.model: Projector(work, _ANY, AnalyticCosts(_ANY)) for work in (NETWORK, SEQUENCES)
}

CASES = [*range(10), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(10, 300))]


@pytest.mark.parametrize("seed", CASES)
def test_formulas_are_those_of_virtual_ranks_on_random_platforms(seed: int) -> None:
    closed, virtual = both(seed)
    ratio, per_host = (
        closed.step.seconds / virtual.step.seconds,
        closed.platform.cluster.ranks_per_host,
    )
    # Messages that share a link, and calls of the processor while others travel, are followed one
    # by one there. If hosts have different ranks of the mesh,
    # the groups along all axes are taken to be on as many hosts as the worst of them.
    alike = closed.work.ranks <= per_host or closed.work.ranks % per_host == 0
    assert 0.8 < ratio < (1.2 if alike else 1.65)
    assert closed.memory.total == pytest.approx(virtual.memory.total, rel=0.08)


def twice_as_fast(platform: Platform) -> Platform:
    """Return the platform with twice the rates of everything."""

    def of(part: Any, *names: str) -> Any:
        known = {name: value for name in names if (value := getattr(part, name)) is not None}
        return replace(part, **{name: 2 * value for name, value in known.items()})

    compute, messages, topology = platform.compute, platform.messages, platform.topology
    return replace(
        platform,
        compute=replace(
            of(compute, "memory_bandwidth", "host_bandwidth"),
            peak={dtype: 2 * rate for dtype, rate in compute.peak.items()},
        ),
        messages=replace(
            of(messages, "add", "copy", "allreduce"),
            inside=of(messages.inside, "bandwidth", "shared"),
            between=of(messages.between, "bandwidth", "shared"),
        ),
        topology=None if topology is None else of(topology, "bandwidth"),
    )


RULES = [range(30), pytest.param(range(30, 300), marks=pytest.mark.matrix)]
"""Seeds of random platforms."""


def project(work: Workload, platform: Platform) -> Prediction:
    costs = AnalyticCosts.of(work, platform)
    return PROJECTORS[work.model].with_platform(platform, costs).project(work)


@pytest.mark.parametrize("seeds", RULES, ids=["30", "300"])
def test_twice_the_rates_are_never_slower(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        work = random_work(rng)
        platform = random_platform(rng, work.ranks)
        before, after = (project(work, one).seconds for one in (platform, twice_as_fast(platform)))
        assert after <= 1.001 * before, seed


@pytest.mark.parametrize("seeds", RULES, ids=["30", "300"])
def test_twice_the_batch_takes_at_most_twice_the_time(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        work = random_work(rng)
        platform = random_platform(rng, work.ranks)
        one, two = (project(replace(work, batch=n * work.batch), platform) for n in (1, 2))
        assert one.seconds <= 1.001 * two.seconds, seed
        assert two.seconds <= 2.001 * one.seconds, seed
        assert one.memory.total <= two.memory.total, seed


def test_more_memory_makes_no_strategy_impossible() -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        platform = random_platform(rng, 4)
        base = PROJECTORS[NETWORK.model].with_platform(platform, AnalyticCosts(platform))
        works = [*strategies(NETWORK, 4)]
        entries = Oracle(base).rank(works)
        needed = [one.projection.memory.total for one in entries if one.projection]
        found: list[set[str]] = []
        for memory in np.quantile(needed, (0.0, 0.5, 1.0)).tolist():
            cluster = replace(platform.cluster, memory_per_rank=memory)
            oracle = Oracle(base.on(replace(platform, cluster=cluster)))
            found.append({one.work.strategy for one in oracle.rank(works) if one.possible})
        assert found[0] < found[-1]
        assert all(few <= many for few, many in pairwise(found))
