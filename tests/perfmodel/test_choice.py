from __future__ import annotations

from pydtnn.layers import Conv2d, Flatten, Linear, Sequential
from pydtnn.perfmodel.choice import bottleneck, explain, plan_lines, ranked
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.projection import Projector, Workload
from pydtnn.perfmodel.search import search
from pydtnn.perfmodel.strategy import Strategy
from tests.perfmodel.costs import PerFlop


def test_a_choice_is_explained_with_its_rivals():
    net = Sequential(Conv2d(8, 3, name="conv"), Flatten(), Linear(512, name="fc"), Linear(10))
    work = Workload(net, (16, 16, 3), global_batch=32)
    own = Projector(work, Platform.load("cpu-1gbit"), PerFlop())
    found = search(own, 4)
    text = explain(found, 1e9)
    assert text.startswith(f"{found.best.strategy.name}")
    assert "ms per step by the model" in text
    assert "times as fast as" in text
    assert "per rank" in text
    head, best, *rest = ranked(found)
    assert head.split()[:3] == ["strategy", "ms/step", "compute"]
    assert best.startswith(found.best.strategy.name)
    assert 1 <= len(rest) < 5
    assert bool(plan_lines(found.best)) == (found.best.strategy.plan is not None)


def test_the_bottleneck_is_the_largest_part_with_its_layer():
    net = Sequential(Conv2d(8, 3, name="conv"), Flatten(), Linear(10))
    work = Workload(net, (16, 16, 3), global_batch=32)
    slow = Projector(work, Platform.load("cpu-1gbit"), PerFlop(rate=1e6))
    assert "compute takes" in bottleneck(slow.project(Strategy({"data": 2})))
    assert "most of it in conv" in bottleneck(slow.project(Strategy({"data": 2})))
    fast = Projector(work, Platform.load("cpu-1gbit"), PerFlop(call=1e-9, rate=1e13))
    assert "the exchange of gradients takes" in bottleneck(fast.project(Strategy({"data": 8})))
