"""Hooks around the passes of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.layers import Dropout, Linear, ReLU, Sequential, StepContext
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.model.execution import forward_node
from pydtnn.model.passes import Hook, Pass, Run, compose
from tests.model.networks import assert_same, passes


class Seen(Hook):
    """Notes which nodes run."""

    def __init__(self, number: int, seen: list[tuple[int, str, str]]) -> None:
        self.number, self.seen = number, seen

    def noting(self, way: str, run: Run) -> Run:
        def note(node: Node, state: Any) -> Pass:
            self.seen.append((self.number, way, node.name))
            return run(node, state)

        return note

    def forward(self, run: Run) -> Run:
        return self.noting("forward", run)

    def backward(self, run: Run) -> Run:
        return self.noting("backward", run)


def net() -> Sequential:
    return Sequential(Linear(5, name="a"), ReLU(name="b"), Dropout(0.5, name="c"))


def test_a_network_without_features_runs_nothing_around_its_nodes():
    graph = Model(net(), (3,)).graph
    assert (graph.hooks, graph.late) == ([], ())
    assert compose(forward_node, graph.hooks, "forward") is forward_node


def test_hooks_run_around_every_node_the_last_one_outermost_and_change_nothing():
    model, seen = Model(net(), (3,), backend="numpy", dtype="float64"), []
    expected = passes(model)
    model.graph.hooks += [Seen(0, seen), Seen(1, seen)]
    assert_same(passes(model), expected)
    both = [*(("forward", name) for name in "abc"), *(("backward", name) for name in "cba")]
    assert seen == [(number, *step) for step in both for number in (1, 0)]


def test_hooks_of_forward_run_in_recomputation_and_those_of_backward_in_its_first_half():
    model, seen = Model(net(), (3,), recompute=2, dtype="float64"), []
    model.graph.hooks.append(Seen(0, seen))
    context = StepContext(training=True, samples=np.arange(2))
    _, residuals = model.forward(np.ones((2, 3)), context)
    del seen[:]
    model.backward_shards([np.ones((2, 5))], [residuals], inputs_only=True)
    assert "forward" in [way for _, way, _ in seen]
    assert seen[-1] == (0, "backward", "a")
    del seen[:]
    model.backward_parameters(residuals)
    assert seen == []
