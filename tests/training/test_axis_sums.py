"""Gradients of groups with further axes than data."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn import Mesh, Model
from pydtnn.layers import Layer, Linear, Sequential
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.axis_sums import AxisSums


class Slopes(Layer):
    """Scales features by parameters, whose gradient each rank computes over its features only."""

    def __init__(self, name: str, axes: tuple[str, ...], place: int = 0, parts: int = 1) -> None:
        super().__init__(name=name)
        self.axes, self.place, self.parts = axes, place, parts

    def build(self, *shapes: Any) -> Any:
        (shape,) = shapes
        self.scale = self.parameter("scale", (1,), "ones")
        self.scale.group = "+".join(("data", *self.axes))
        return shape

    def forward(self, *xs: Any, context: Any) -> Any:
        (x,) = xs
        return x * self.scale.value, x

    def backward(self, dy: Any, saved: Any) -> Any:
        own = slice(self.place, None, self.parts)
        self.scale.store_grad((dy * saved)[:, own].sum(keepdims=True).reshape(1))
        return dy * self.scale.value


def network(axes: tuple[str, ...], place: int = 0, parts: int = 1) -> Sequential:
    def scale(name: str) -> Slopes:
        return Slopes(name, axes, place, parts)

    return Sequential(scale("a"), Linear(6), scale("b"), scale("c"), Linear(3))


@pytest.mark.threads(2)
def test_a_scheme_receives_summed_buckets_in_the_order_of_backward(comm):
    mesh = Mesh(comm, model=2)
    options: dict[str, Any] = {"backend": "numpy", "bucket_bytes": 1}
    model = Model(network(("model",), comm.rank, 2), (4,), **options)
    received: list[tuple[int, float]] = []

    class Watched(AllReduce):
        def bucket_ready(self, bucket: Bucket) -> None:
            received.append((bucket.index, float(bucket.grads[0])))

    sums = AxisSums(Watched(mesh.data), mesh)
    for bucket in model.buckets:
        bucket.grads[...] = 1 + comm.rank
        sums.ready(bucket)
        assert len(received) < len(model.buckets) or bucket.group == "data"
        sums.progress()
    sums.finish()
    assert [index for index, _ in received] == [bucket.index for bucket in model.buckets]
    groups = {bucket.index: bucket.group for bucket in model.buckets}
    assert all(
        value == (3 if groups[index] == "data+model" else 1 + comm.rank)
        for index, value in received
    )
    assert {*groups.values()} == {"data", "data+model"}
