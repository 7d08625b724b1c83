import pytest

from pydtnn.tools.perfmodel.oracle.ranking import MAX_STAGES, Variants, strategies
from pydtnn.training.workload import SHARDED, Workload

WORK = Workload("resnet20", (16, 16, 3))
PLAIN = Variants(recompute=False, sharded=False)


def found_for(*args, **options):
    return strategies(WORK, *args, **options)


def test_all_factorisations_occur_once():
    for ranks, number in ((1, 1), (2, 2), (6, 4), (8, 4)):
        found = [*found_for(ranks, ("data", "filter"), PLAIN)]
        assert len(found) == len({s.strategy for s in found}) == number
        assert {s.ranks for s in found} == {ranks}
    found = found_for(8, ("data", "spatial", "filter"), PLAIN, most=2)
    names = [s.strategy for s in found]
    assert len(names) == len({*names})
    assert {"spatial 2 x filter 4", "spatial 4 x filter 2", "data 2 x spatial 2 x filter 2"} <= {
        *names
    }
    found = found_for(64, ("data", "pipeline"), PLAIN)
    assert max(s.stages for s in found) == MAX_STAGES


def test_variants_are_added_where_they_apply():
    found = [*found_for(4, ("filter",), Variants(compress=("top_k",)))]
    assert [s.strategy for s in found] == ["filter 4", "filter 4, recompute"]
    names = [s.strategy for s in found_for(4, ("data",), Variants(compress=("top_k",)))]
    sharded = [f"data 4, {scheme}" for scheme in SHARDED]
    assert names == ["data 4", "data 4, recompute", *sharded, "data 4, top_k"]
    variants = Variants(recompute=False, sharded=False, schedules=("1f1b", "chimera"))
    names = [s.strategy for s in found_for(2, ("data", "pipeline"), variants)]
    assert names == ["data 2", "pipeline 2", "pipeline 2, chimera"]


def test_unknown_strategies_are_refused():
    with pytest.raises(ValueError, match="spatial"):
        [*found_for(2, ("spacial",))]
