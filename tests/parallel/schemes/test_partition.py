"""Parts of buckets are dealt out so that all ranks end up with as much."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import Linear
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import ShardedOptimizer
from pydtnn.parallel.schemes.sharded import level
from tests.each import each
from tests.parallel.schemes.course import fit, trainer_of


def test_parts_fill_a_stretch_and_are_cut_where_it_is_allowed(rng):
    for _ in range(300):
        size = int(rng.integers(1, 9))
        places = np.append(0, np.cumsum(rng.integers(1, 50, rng.integers(1, 12))))
        counts = level(rng.integers(0, 100, size), places)
        assert len(counts) == size
        assert min(counts) >= 0
        assert sum(counts) == places[-1]
        assert set(np.cumsum(counts)) <= set(places)


@each("after", [0, 1])
def test_parts_of_another_model_are_refused_on_every_rank(after):
    """One exchange for two trainers: the later one's optimizer has made other parts."""

    def rank(comm: Communicator) -> None:
        exchange = ShardedOptimizer(comm)
        first = trainer_of(exchange, SGD(0.1))
        fit(first, after)
        second = trainer_of(exchange, SGD(0.1), net=Linear(3))
        with pytest.raises(ValueError, match="another model, bound by a later trainer; create"):
            fit(first, 2)
        fit(second, 1)

    run_threads(3, rank)


def places(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Where a bucket can be cut: anywhere, nowhere, or between parameters of up to 100."""
    if kind == "anywhere":
        return np.arange(rng.integers(1, 500) + 1)
    sizes = [100] if kind == "nowhere" else rng.integers(1, 100, 5)
    return np.append(0, np.cumsum(sizes))


@each(("kind", "most"), [("anywhere", 2), ("nowhere", 100), ("parameters", 200)])
@each("size", [1, 2, 3, 8])
def test_loads_stay_within_a_parameter_of_each_other(kind, most, size, rng):
    loads = np.zeros(size, int)
    for _ in range(40):
        loads += level(loads, places(kind, rng))
    assert loads.max() - loads.min() <= most
