"""The loops of a model compute what the naive ones compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers.base import StepContext
from pydtnn.model import Model, naive
from pydtnn.models import create_net
from tests.each import each
from tests.model.networks import assert_same, passes
from tests.parallel.trajectories import observe, randomize
from tests.random_cases import Case, Cases
from tests.random_networks import NUMPY, Network, for_each_network

SHAPES: dict[str, Any] = {
    **{"alexnet": (29, 30, 1), "inception_v3": (75, 76, 3), "cosmoflow": (16, 17, 18, 2)},
    **{"cnn1d": (32, 3), "mlp": (4, 5), "char_gru": (6,), "char_lstm": (6,)},
    **dict.fromkeys(("vgg11", "vgg11_bn"), (32, 33, 3)),
    **dict.fromkeys(("vit_small", "vit_tiny"), (8, 12, 3)),
    **dict.fromkeys(("bert_nano", "gpt_nano", "llama_nano", "moe_gpt_nano"), (6,)),
    **dict.fromkeys(("t5_nano", "transformer_nano"), ((6,), (5,))),
}
"""Of samples; others are images of (8, 9, 1)."""

OPTIONS: dict[str, dict[str, Any]] = {
    "alexnet": {"local_response": True},
    "mlp": {"hidden": [7, 6, 5], "dropout": 0.2},
    "cosmoflow": {"stages": 3, "filters": 4},
    "googlenet": {"kernel": 5},
    "vit_tiny": {"dropout": 0.1, "attention_dropout": 0.1},
    "whitened_cnn": {"widths": [3, 4], "residual": [0, 2]},
}

SMALL = [
    *("bert_nano", "char_gru", "cnn", "cnn1d", "gpt_nano", "mlp", "moe_gpt_nano", "resnet8"),
    *("t5_nano", "transformer_nano", "vit_tiny", "whitened_cnn"),
]

OTHERS = [
    *("alexnet", "char_lstm", "cosmoflow", "densenet40", "densenet121", "googlenet", "llama_nano"),
    *("inception_v3", "mobilenet_v1", "mobilenet_v2", "resnet18", "resnet50", "resnext50", "vgg11"),
    *("vgg11_bn", "vit_small"),
]
"""Networks of other blocks: those that are left out are deeper or wider than one of these."""


class Naive(Model):
    """A model that runs in the naive loops."""

    def forward(self, x: Any, context: StepContext, *, keep: bool = True, **_: Any) -> Any:
        self.refresh()
        context = replace(context, differentiable=keep)
        xs = x if isinstance(x, tuple) else (x,)
        ys, saved = naive.forward(self.graph, xs, context)
        return tuple(ys) if len(ys) > 1 else ys[0], saved

    def backward(self, dy: Any, residuals: Any, *, accumulate: bool = False, **_: Any) -> Any:
        for buffer in self.buffers:
            buffer.accumulate = accumulate
        dxs = naive.backward(self.graph, dy if isinstance(dy, tuple) else (dy,), residuals)
        return tuple(dxs) if len(dxs) > 1 else dxs[0]


def check(name: str) -> None:
    shape, options = SHAPES.get(name, (8, 9, 1)), OPTIONS.get(name, {})

    def step(kind: type[Model], fuse: bool) -> dict[str, np.ndarray]:
        model = kind(create_net(name, 11, shape, **options), shape, dtype="float64", fuse=fuse)
        return passes(model)

    expected = step(Naive, False)
    gradients = {key: array for key, array in expected.items() if key.startswith("grad")}
    assert all(np.isfinite(array).all() and array.any() for array in gradients.values())
    assert_same(step(Model, False), expected)
    # Rounding, which batch norms over a few rows enlarge in each block.
    assert_same(step(Model, True), expected, 1e-6)


@each("name", SMALL, few=6)
def test_small_networks_compute_the_same_bytes_and_fused_within_rounding(name):
    check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_compute_the_same_bytes_and_fused_within_rounding(name):
    check(name)


@each(("backend", "dtype"), [(NUMPY, "float64"), (create_backend("cpu", threads=1), "float32")])
def test_random_networks_compute_the_same_bytes(backend, dtype):
    def trained(kind: type[Model], network: Network, backend: Backend) -> dict[str, np.ndarray]:
        options: dict[str, Any] = {"bucket_bytes": network.bucket_bytes, "dtype": dtype}
        options |= {"input_gradient": network.input_gradient, "fuse": False}
        model = kind(network.net(), network.inputs, backend=backend, **options)
        randomize(model, network)
        return observe(model, network, micro=2)

    def compare(case: Case, network: Network) -> None:
        found, expected = (trained(kind, network, backend) for kind in (Model, Naive))
        np.testing.assert_equal(found, expected)

    for case in range(1):
        cases = Cases("networks", "naive loops", seconds=0, only=case)
        for_each_network(cases, compare, shared=True)
