"""All strategies on all platforms: the oracle answers, or says in a sentence what does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import isfinite

import pytest

from pydtnn.perfmodel.compute import AnalyticCosts
from pydtnn.perfmodel.oracle import KINDS, Entry, Oracle, Variants, strategies
from pydtnn.perfmodel.platform import Platform, platform_names
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.search import search
from pydtnn.perfmodel.workload import Workload

WORK = Workload("resnet8", (32, 32, 3), batch=64)
"""Its shortcuts, windows of 1 x 1 with a stride of 2, exchange no halo on some ranks."""

PER_HOST = (1, 2, 3, 4, 8)
RANKS = range(1, 17)
ALL = Variants(compress=("top_k", "float16", "power_sgd"))
FAST = [(name, number) for number in PER_HOST for name in platform_names()[number % 3 :: 3]]


@cache
def projector_for(name: str) -> Projector:
    platform = Platform.load(name)
    return Projector(WORK, platform, AnalyticCosts(platform))


def projector_on(name: str, per_host: int) -> Projector:
    first = projector_for("cpu-1gbit")  # outlines are those of all platforms
    platform = Platform.load(name)
    platform = replace(platform, cluster=replace(platform.cluster, ranks_per_host=per_host))
    return first.with_platform(platform, AnalyticCosts(platform))


def works_for(ranks: int, variants: Variants, most: int = 1) -> Iterator[Workload]:
    kinds = [kind for kind in KINDS if kind not in ("context", "expert")]  # of others
    for work in strategies(WORK, ranks, kinds, variants, most=most):
        yield work
        if work.data > 1:
            yield replace(work, scheme="hierarchical")


def check(entries: Sequence[Entry]) -> None:
    """Check that all are predicted; the network has rows, filters and layers for 16 ranks."""
    assert entries
    for entry in entries:
        one = entry.projection
        assert one is not None, f"{entry.work.strategy}: {entry.reason}"
        assert isfinite(one.epoch)
        assert one.seconds > 0
        assert entry.bottleneck
        assert 0 < entry.efficiency < 10


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "per_host"), FAST)
def test_every_axis_has_a_prediction(name: str, per_host: int) -> None:
    oracle = Oracle(projector_on(name, per_host))
    check([oracle.entry(work) for n in (2, 6, 8, 9) for work in works_for(n, Variants(False))])


@pytest.mark.long
@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("per_host", PER_HOST)
@pytest.mark.parametrize("name", platform_names())
def test_every_strategy_of_1_to_16_ranks_has_a_prediction(
    name: str, per_host: int, ranks: int
) -> None:
    oracle = Oracle(projector_on(name, per_host))
    check([oracle.entry(work) for work in works_for(ranks, ALL, most=2)])


@pytest.mark.long
@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("per_host", PER_HOST)
def test_every_number_of_ranks_has_a_plan_for_each_layer(per_host: int, ranks: int) -> None:
    assert search(projector_on("cpu-10gbit", per_host), ranks).best.seconds > 0
