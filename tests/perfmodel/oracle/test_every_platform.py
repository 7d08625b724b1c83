"""All strategies on all platforms: the oracle answers, or says in a sentence what does not fit."""

from dataclasses import replace
from functools import cache
from math import isfinite

import pytest

from pydtnn.perfmodel import oracle
from pydtnn.perfmodel.compute import AnalyticCosts
from pydtnn.perfmodel.oracle import Oracle, Variants, strategies
from pydtnn.perfmodel.platform import Platform, platform_names
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.search import search
from pydtnn.perfmodel.workload import Workload
from tests.each import each

WORK = Workload("resnet8", (32, 32, 3), batch=64)
"""Its shortcuts, windows of 1 x 1 with a stride of 2, exchange no halo on some ranks."""

PER_HOST = (1, 2, 3, 4, 8)
CASES = [(name, number) for number in PER_HOST for name in platform_names()[number % 3 :: 3]]
KINDS = [kind for kind in oracle.KINDS if kind not in ("context", "expert")]  # of other networks
ALL = Variants(compress=("top_k", "float16", "power_sgd"))


@cache
def projector_for(name: str) -> Projector:
    platform = Platform.load(name)
    return Projector(WORK, platform, AnalyticCosts(platform))


def projector_on(name: str, per_host: int) -> Projector:
    first = projector_for("cpu-1gbit")  # outlines are those of all platforms
    platform = Platform.load(name)
    platform = replace(platform, cluster=replace(platform.cluster, ranks_per_host=per_host))
    return first.with_platform(platform, AnalyticCosts(platform))


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "per_host"), CASES)
def test_every_strategy_has_a_prediction(name: str, per_host: int) -> None:
    """The network has rows, filters and layers for 16 ranks."""
    own = Oracle(projector_on(name, per_host))
    for ranks in (2, 6, 9):
        for entry in map(own.entry, strategies(WORK, ranks, KINDS, ALL, most=2)):
            one = entry.projection
            assert one is not None, f"{entry.work.strategy}: {entry.reason}"
            assert isfinite(one.epoch)
            assert one.seconds > 0
            assert entry.bottleneck
            assert 0 < entry.efficiency < 10


@pytest.mark.long
@each("ranks", [1, 5, 16])
@each("per_host", PER_HOST)
def test_every_number_of_ranks_has_a_plan_for_each_layer(per_host: int, ranks: int) -> None:
    assert search(projector_on("cpu-10gbit", per_host), ranks).best.seconds > 0
