import pytest

from pydtnn.perfmodel.oracle.ranking import MOST_STAGES, Variants, strategies
from pydtnn.perfmodel.workload import SHARDED, Workload
from tests.each import each

WORK = Workload("resnet20", (16, 16, 3))
PLAIN = Variants(recompute=False, sharded=False)


def found_for(*args, **options):
    return strategies(WORK, *args, **options)


def test_one_rank_has_one_strategy() -> None:
    assert [s.strategy for s in found_for(1, variants=PLAIN)] == ["serial"]


@each("ranks", [2, 6, 8])
def test_all_factorisations_occur_once(ranks: int) -> None:
    found = [s.strategy for s in found_for(ranks, ("data", "filter"), PLAIN)]
    factors = [part for part in range(1, ranks + 1) if ranks % part == 0]
    assert len(found) == len({*found}) == len(factors)


def test_every_strategy_has_all_ranks() -> None:
    assert all(s.ranks == 12 for s in found_for(12))


def test_variants_are_added_where_they_apply() -> None:
    found = [*found_for(4, ("filter",), Variants(compress=("top_k",)))]
    assert [s.strategy for s in found] == ["filter 4", "filter 4, recompute"]
    names = [s.strategy for s in found_for(4, ("data",), Variants(compress=("top_k",)))]
    sharded = [f"data 4, {scheme}" for scheme in SHARDED]
    assert names == ["data 4", "data 4, recompute", *sharded, "data 4, top_k"]
    variants = Variants(recompute=False, sharded=False, schedules=("1f1b", "chimera"))
    names = [s.strategy for s in found_for(2, ("data", "pipeline"), variants)]
    assert names == ["data 2", "pipeline 2", "pipeline 2, chimera"]


def test_pipelines_have_a_limited_number_of_stages() -> None:
    found = found_for(64, ("data", "pipeline"), PLAIN)
    assert max(s.stages for s in found) == MOST_STAGES


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="spatial"):
        [*found_for(2, ("spacial",))]


def test_hybrids_of_several_axes_have_all_factorisations() -> None:
    found = [s.strategy for s in found_for(8, ("data", "spatial", "filter"), PLAIN, most=2)]
    assert len(found) == len({*found})
    for name in ("spatial 2 x filter 4", "spatial 4 x filter 2", "data 2 x spatial 2 x filter 2"):
        assert name in found
