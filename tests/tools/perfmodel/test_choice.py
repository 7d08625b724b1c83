from pydtnn.layers import Conv2d, Flatten, Linear, Sequential
from pydtnn.tools.perfmodel.choice import explain, search_lines
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.search import search
from pydtnn.training.workload import Workload
from tests.tools.perfmodel.costs import PerFlop


def test_a_choice_is_explained_with_its_rivals():
    net = Sequential(Conv2d(8, 3, name="conv"), Flatten(), Linear(512, name="fc"), Linear(10))
    work = Workload(net, (16, 16, 3), batch=32)
    own = Projector(work, Platform.load("cpu-1gbit"), PerFlop())
    found = search(own, 4)
    text, head, best, *rest = explain(found, 1e9)
    assert text.startswith(f"{found.best.work.strategy}")
    assert "ms per step by the model" in text
    assert "times as fast as" in text
    assert "per rank" in text
    assert head.split()[:3] == ["strategy", "ms/step", "compute"]
    assert best.startswith(found.best.work.strategy)
    plan = [line for line in rest if line.startswith("plan: ")]
    assert 1 <= len(rest) - len(plan) < 5
    _, lines = search_lines(own, 4)
    assert lines[0] == f"4 ranks: {explain(found, own.platform.cluster.memory_per_rank)[0]}"
    assert lines[-1].startswith("train with: --parallel ")
    assert bool(plan) == (found.best.work.plan is not None)
