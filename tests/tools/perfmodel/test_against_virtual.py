"""The closed forms against the program itself on virtual ranks, and rules that any model obeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.platform import Cluster, Compute, Link, MessageSpeed, Platform
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.topology import Dragonfly, FatTree, Topology, Torus
from pydtnn.tools.perfmodel.virtual.steps import predict
from pydtnn.training.workload import SHARDED, Workload
from tests.each import each

NETWORK, DEEPER = (Workload(name, (16, 16, 3), batch=32) for name in ("resnet8", "resnet20"))
SEQUENCES = Workload(
    "moe_gpt_nano", (32,), 256, batch=32, model_options={"tied": False, "experts": 4}
)

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


FURTHER: list[tuple[Workload, dict[str, Any]]] = [
    *(
        (NETWORK, {"axes": {"pipeline": 4}, "micro_batches": 8, "pipeline_schedule": schedule})
        for schedule in ("1f1b", "zb_v", "dualpipe")
    ),
    (
        NETWORK,
        {"axes": {"data": 4}, "scheme": "sharded_parameters", "scheme_options": {"copies": 2}},
    ),
    (NETWORK, {"axes": {"data": 4}, "optimizer": "adam", "optimizer_options": {}}),
    (NETWORK, {"axes": {"data": 2}, "accumulation": 3}),
    (NETWORK, {"axes": {"data": 2, "filter": 2}, "accumulation": 2}),
    *((NETWORK, {"axes": {"data": 4}, "accumulation": 2, "scheme": scheme}) for scheme in SHARDED),
    *((NETWORK, {"axes": {"data": 2, "filter": 2}, "scheme": scheme}) for scheme in SHARDED),
    (NETWORK, {"axes": {"data": 2, "spatial": 2}, "scheme": "sharded_gradients"}),
]

EVERY = STRATEGIES + FURTHER


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
            peak={"float32": (peak := power(10, 12)), "bfloat16": peak * rng.uniform(1, 4)},
            memory_bandwidth=power(9.5, 11),
            host_bandwidth=some(power(10.5, 11.5)),
            call=some(power(-6, -4.5), 0.0),
            step=some(power(-5, -3), 0.0),
        ),
        messages=MessageSpeed(
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


def random_case(seed: int | np.random.Generator) -> tuple[Workload, Platform]:
    """Return a strategy of those above with further fields at random, if a run may have them."""
    rng = np.random.default_rng(seed)
    work, given = EVERY[rng.integers(len(EVERY))]
    batch = PRIMES[rng.integers(len(PRIMES))] if rng.random() < 0.7 else int(rng.integers(8, 65))
    work = replace(work, batch=batch, **given)
    platform = random_platform(rng, work.ranks)
    many = {"accumulation" if work.stages == 1 else "micro_batches": int(rng.integers(2, 5))}
    further: list[dict[str, Any]] = [
        many,
        {"scheme": SHARDED[rng.integers(3)]} if work.data > 1 else {},
        {"dtype": "bfloat16"},
        {"optimizer": "adam", "optimizer_options": {}},
    ]
    for one in further:
        if rng.random() < 0.25 and possible(more := replace(work, **one), platform):
            work = more
    return work, platform


def possible(work: Workload, platform: Platform) -> bool:
    try:
        return bool(project(work, platform))
    except ValueError:
        return False


def project(work: Workload, platform: Platform) -> Prediction:
    costs = AnalyticCosts.of(work, platform)
    projector = PROJECTORS[work.model, work.dtype].with_platform(platform, costs)
    return projector.project(work)


def compare(work: Workload, platform: Platform) -> tuple[float, float]:
    """Return the ratios of times and of memory of the closed forms to those of virtual ranks."""
    closed = project(work, platform)
    virtual = predict(work, platform, AnalyticCosts.of(work, platform))
    assert closed.loader == pytest.approx(virtual.loader)
    memory = closed.memory.total / virtual.memory.total
    return closed.step.seconds / virtual.step.seconds, memory


ANY = Platform.load("cpu-10gbit")
ANY = replace(ANY, compute=replace(ANY.compute, threads=1))
PROJECTORS = {
    (work.model, dtype): Projector(replace(work, dtype=dtype), ANY, AnalyticCosts(ANY))
    for work in (NETWORK, DEEPER, SEQUENCES)
    for dtype in ("float32", "bfloat16")
}


def platform_of(per_host: int, cores: int, **given: Any) -> Platform:
    cluster = replace(ANY.cluster, ranks_per_host=per_host, cores_per_host=cores)
    return replace(ANY, cluster=cluster, messages=replace(ANY.messages, **given))


PLATFORMS = {
    "a rank on each host": platform_of(1, 1),
    "hosts of 2 ranks": platform_of(2, 2, allreduce=2e9),
    "a host": platform_of(4, 4, allreduce=2e9),
    "a host with shared cores": platform_of(4, 2, allreduce=2e9, call=1e-6),
}


@pytest.mark.few(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", EVERY, ids=lambda one: replace(one[0], **one[1]).name)
@pytest.mark.parametrize("name", PLATFORMS)
def test_a_step_takes_as_long_as_on_virtual_ranks(name, strategy):
    work = DEEPER if strategy[0] is NETWORK else strategy[0]
    work = replace(work, **strategy[1]).in_micro_batches()
    seconds, memory = compare(work, PLATFORMS[name])
    # ranks with several neighbours are followed one by one there, and assumed to be alike here
    many = max([1, *work.cut.values()]) > 2
    assert seconds == pytest.approx(1, abs=0.15 if many else 0.06)
    assert memory == pytest.approx(1, abs=0.06)  # buffers of sums, and memory between arrays


@pytest.mark.long
@each("axes", [{"data": 2}, {"data": 2, "spatial": 2}, {"data": 2, "pipeline": 2}])
def test_a_step_with_activations_of_16_bits_takes_as_long_as_on_virtual_ranks(axes):
    compute = replace(ANY.compute, peak=ANY.compute.peak | {"bfloat16": 3e12})
    platform = replace(ANY, compute=compute)
    work = replace(NETWORK, dtype="bfloat16", axes=axes).in_micro_batches()
    costs = AnalyticCosts.of(work, platform)
    closed = Projector(work, platform, costs).project(work)
    virtual = predict(work, platform, AnalyticCosts.of(work, platform))
    assert closed.step.seconds == pytest.approx(virtual.step.seconds, rel=0.05)
    assert closed.memory.total == pytest.approx(virtual.memory.total, rel=0.05)


@pytest.mark.long
@each("gbit, bucket_bytes", [(10, None), (10, 1 << 30), (25, 1 << 30), (100, None)])
def test_chunks_of_long_arrays_are_posted_and_added_while_others_travel(gbit, bucket_bytes):
    platform = Platform.load("cpu-10gbit")
    link = replace(platform.messages.between, bandwidth=gbit * 1e9 / 8)
    platform = replace(platform, messages=replace(platform.messages, between=link))
    axes = {"data": 4}
    work = Workload("vgg11", (32, 32, 3), batch=128, axes=axes, bucket_bytes=bucket_bytes)
    costs = AnalyticCosts.of(work, platform)
    own, virtual = Projector(work, platform, costs).project(work), predict(work, platform, costs)
    assert own.seconds == pytest.approx(virtual.seconds, rel=0.07)


@each(("batch", "schedule"), [(9, "1f1b"), (17, "zb_v")], few=1)
def test_uneven_micro_batches_of_a_pipeline_take_their_own_times(batch, schedule):
    platform = platform_of(1, 1, call=0.0)
    platform = replace(platform, compute=replace(platform.compute, call=0.0, step=0.0))
    work = replace(DEEPER, batch=batch, axes={"pipeline": 2}, pipeline_schedule=schedule)
    assert compare(work, platform)[0] == pytest.approx(1, abs=0.05)


def test_gradients_of_stripes_are_in_the_buckets_of_the_program():
    """Sums along "data" begin when those over stripes are complete; nothing else takes time."""
    work = replace(NETWORK, axes={"data": 2, "spatial": 2})
    assert compare(work, platform_of(1, 1, call=0.0))[0] == pytest.approx(1, abs=0.01)


CASES = [*range(10), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(10, 500))]


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", CASES)
def test_formulas_are_those_of_virtual_ranks_on_random_platforms(seed):
    ratio, memory = compare(*random_case(seed))
    assert 0.9 < ratio < 1 / 0.9
    assert memory == pytest.approx(1, abs=0.11)  # of zb_v; of others 0.08


RATES = {"peak", "memory_bandwidth", "host_bandwidth", "bandwidth", "shared", "add", "copy"}
RATES |= {"allreduce"}


def twice_as_fast(part: Any, name: str = "") -> Any:
    """Return a platform with twice the rates of everything."""
    if name in RATES and part is not None:
        return {key: 2 * rate for key, rate in part.items()} if name == "peak" else 2 * part
    if not is_dataclass(part):
        return part
    found = {own.name: twice_as_fast(getattr(part, own.name), own.name) for own in fields(part)}
    return replace(part, **found)  # type: ignore[type-var]


@each("seed", range(30), few=10)
def test_twice_the_rates_are_never_slower_nor_twice_the_batch_more_than_twice(seed):
    work, platform = random_case(seed)
    one, two = (project(replace(work, batch=n * work.batch), platform) for n in (1, 2))
    room = 1.001 if work.stages == 1 else 1.1  # another order of messages may be a worse one
    assert project(work, twice_as_fast(platform)).seconds <= room * one.seconds
    assert one.seconds <= room * two.seconds
    assert two.seconds <= room * 2 * one.seconds
    assert one.memory.total <= two.memory.total
