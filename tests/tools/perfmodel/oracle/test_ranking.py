from dataclasses import replace
from functools import partial

import pytest

from pydtnn.models.gpt import gpt
from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.oracle import Oracle, best, find_limits
from pydtnn.tools.perfmodel.oracle.ranking import (
    KINDS,
    MAX_BLOCK_STAGES,
    SLACK,
    Variants,
    strategies,
)
from pydtnn.tools.perfmodel.oracle.table import Limit
from pydtnn.tools.perfmodel.patterns import rows_of
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from tests.tools.perfmodel.costs import PerFlop

INPUT = (16, 16, 3)
WORK = Workload("resnet20", INPUT, batch=64, samples=1000)
PLAIN = Variants(recompute=False, sharded=False)


@pytest.fixture(scope="module")
def projector() -> Projector:
    return Projector(WORK, Platform.load("cpu-1gbit"), PerFlop())


def on(**axes: int) -> Workload:
    return replace(WORK, axes=axes)


def test_entries_are_in_the_order_of_time_and_impossible_ones_last(projector):
    entries = Oracle(projector).sweep([8], ("data", "spatial", "filter"), PLAIN)[8]
    possible = [entry for entry in entries if entry.possible]
    times = [entry.projection.epoch for entry in possible if entry.projection]
    assert times == pytest.approx(sorted(times), rel=0.011)  # variants come after equal ones
    assert entries[: len(possible)] == possible
    assert best(entries) is entries[0]


def test_an_entry_has_its_efficiency_and_node_hours_or_says_why_it_does_not_fit(projector):
    oracle = Oracle(projector)
    assert oracle.entry(on()).efficiency == pytest.approx(1)
    entry = oracle.entry(on(data=4))
    assert entry.projection is not None
    assert entry.node_hours == pytest.approx(4 * entry.projection.epoch / 3600)
    impossible = oracle.entry(on(data=1, spatial=64))
    assert (impossible.projection, impossible.efficiency, impossible.node_hours) == (None, 0, 0)
    assert "spatial=64" in impossible.reason


def test_a_rank_with_too_little_memory_is_named(projector):
    cluster = replace(projector.platform.cluster, memory_per_rank=1e7)
    small = projector.with_platform(replace(projector.platform, cluster=cluster), projector.costs)
    entry = Oracle(small).entry(on(data=2))
    assert not entry.possible
    assert "a rank needs" in entry.reason
    assert best([entry]) is None


def test_weak_scaling_keeps_the_samples_of_a_rank(projector):
    oracle = Oracle(projector, per_rank=4)
    found = [oracle.entry(on(data=ranks)).projection for ranks in (1, 2, 8)]
    assert [one.work.samples_per_rank for one in found if one] == [4, 4, 4]


def test_slow_links_make_messages_the_bottleneck(projector):
    platform = projector.platform
    between = replace(platform.messages.between, bandwidth=1e5)
    slow = replace(platform, messages=replace(platform.messages, between=between))
    oracle = Oracle(projector.with_platform(slow, projector.costs))
    assert oracle.entry(on(data=2)).bottleneck == "sums of gradients"
    assert oracle.entry(on(data=1, filter=2)).bottleneck.startswith("exchanges (")


def test_limits_name_the_layer(projector):
    limits = {x.kind: x for x in find_limits(WORK, projector.backend)}
    assert limits["data"].ranks == 64
    assert (limits["filter"].ranks, limits["filter"].reason) == (10, "head.fc has 10 features")
    assert (limits["channel"].ranks, limits["spatial"].ranks) == (16, 4)
    experts = Workload("moe_gpt_nano", (16,), batch=64)
    assert Limit("expert", 4, "block0.moe.experts has 4 experts") in find_limits(
        experts, projector.backend
    )


def test_rows_of_the_output_have_all_terms(projector):
    row = Oracle(projector).entry(on(data=2)).to_json()
    parts = ("forward", "backward", "recomputed", "other", "update", "layers_exposed")
    waits = ("gradients_exposed", "idle", "loader")
    assert sum(row[name] for name in (*parts, *waits)) == pytest.approx(row["seconds_per_step"])
    memory = ("parameters", "gradients", "slots", "activations", "scratch", "messages", "process")
    assert sum(row[f"memory_{name}"] for name in memory) == pytest.approx(row["memory"])


def test_strategies_of_a_transformer_are_predicted_or_refused_in_one_sentence():
    work = Workload("gpt", (16,), batch=64, samples=1000)
    oracle = Oracle(Projector(work, Platform.load("cpu-1gbit"), PerFlop()))
    entries = {entry.work.strategy: entry for entry in oracle.sweep([4], variants=PLAIN, most=2)[4]}
    for name in ("context 4", "tensor 4", "data 2 x context 2", "tensor 2 x context 2"):
        assert entries[name].possible
    # nothing has maps or experts; the last layer's matrix is tied
    for name in ("spatial 4", "expert 4", "pipeline 4"):
        assert "\n" not in entries[name].reason != ""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("model", "ranks", "platform"),
    [
        ("gpt", 4, "cpu-1gbit"),
        pytest.param("gpt", 8, "cpu-10gbit", marks=LONG),
        pytest.param("resnet20", 8, "cpu-10gbit", marks=LONG),
    ],
)
def test_only_what_may_be_among_the_fastest_is_followed(model, ranks, platform):
    shape = INPUT if model == "resnet20" else (16,)
    work, top = Workload(model, shape, batch=64, samples=1000), 3
    oracle = Oracle(Projector(work, Platform.load(platform), PerFlop()))
    kinds = KINDS if ranks > 4 else ("data", "filter", "context", "pipeline")
    works = [*strategies(work, ranks, kinds, most=2)]
    every = [entry for entry in oracle.rank(works) if entry.projection is not None]
    for entry in every:
        for together in (False, True):
            seconds, memory = oracle.projector.least(entry.work, together=together)
            assert SLACK * seconds < entry.projection.seconds, entry.work.strategy
            assert SLACK * memory < entry.projection.memory.total, entry.work.strategy
        if entry.work.stages > 1:
            assert oracle.projector.least_of_stages(entry.work) < entry.projection.seconds
    some = [*oracle.fastest(works, top)]
    followed = [entry for entry in some if entry.projection is not None]
    assert len(some) == len(works)
    assert len(followed) < len(every)
    best_of, best_some = (
        sorted(entry.projection.seconds for entry in own)[:top] for own in (every, followed)
    )
    assert best_of == best_some


@LONG
def test_thousands_of_strategies_of_a_large_network_need_few_outlines_and_schedules():
    net = partial(gpt, depth=80, heads=80, width=10240, tied=False)
    work, platform = Workload(net, (2048,), 51200, batch=10240), Platform.load("dgx-a100")
    oracle = Oracle(Projector(work, platform, AnalyticCosts.of(work, platform)))
    works = [*strategies(work, 10240, most=2, stages=MAX_BLOCK_STAGES)]
    works = [one for one in works if not {"spatial", "expert"}.intersection(one.cut)]
    rows_of.cache_clear()
    entries = [*oracle.fastest(works, 10)]
    assert (len(works), len(entries)) == (3751, 3751)
    assert sum(entry.possible for entry in entries) >= 10
    assert sum(entry.projection is not None for entry in entries) < 60
    assert len(oracle.projector._steps) < 300  # networks that were built
    assert rows_of.cache_info().misses < 2000
