"""A scheme is told before each pass of a layer which buckets it reads, now and next."""

from types import SimpleNamespace
from typing import Any

from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.layers.base import StepContext
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.model.presence import Presence


def test_shards_continue_with_what_they_have_read_and_a_new_pass_with_nothing():
    model = Model(Sequential(Linear(2), ReLU(), Linear(2)), (3,), bucket_bytes=8)
    _, first, _, second = model.graph.nodes
    told = []
    presence = Presence(
        model.graph.nodes,
        model.graph.trained,
        model.buckets,
        lambda now, ahead: told.append([sorted(b.index for b in part) for part in (now, ahead)]),
    )

    def run(node: Node, state: Any) -> None:
        """Of a pass nothing but what is told before it."""

    def forward(recomputing: bool) -> Any:
        return SimpleNamespace(context=StepContext(training=True, recomputing=recomputing))

    shard = presence.begin()
    shard(0)
    assert told == []
    presence.forward(run)(first, forward(recomputing=False))
    shard(1)
    presence.forward(run)(first, forward(recomputing=True))
    shard(0)
    presence.backward(run)(second, None)
    one, two = [2, 3], [0, 1]  # a bucket is a parameter, the last one first
    assert told == [[one, two], [one, []], [one, two], [two, one]]
    shard = presence.begin()
    shard(0)
    shard(1)
    assert len(told) == 4
