"""Networks of `pydtnn.models` compute what twins in PyTorch, written after the papers, computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.models import create_net

HEADS = {"dropout": 0.0, "auxiliary": True}
NETWORKS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[float]]] = {
    "densenet40": ((8, 9, 3), {"growth": 3}, [1.59414712, 1.68065597]),
    "densenet121": ((64, 67, 3), {"growth": 8}, [1.01416264, 1.15351542]),
    "resnext50": ((16, 18, 3), {}, [0.941677538, 0.792124476]),
    "mobilenet_v1": ((64, 67, 3), {"width": 0.25}, [1.11985414, 1.3173228]),
    "mobilenet_v2": ((15, 18, 3), {"dropout": 0.0}, [1.16846174, 1.27408854]),
    "googlenet": (
        (65, 67, 3),
        {"kernel": 5, "auxiliary_dropout": 0.0, **HEADS},
        [0.850844411, 0.783945304, 1.17842872, 1.1622949, 1.1192018, 1.11179942],
    ),
    "inception_v3": ((299, 299, 3), HEADS, [0.989206936, 0.826993747, 1.34374481, 1.23470104]),
    "resnet20": ((32, 32, 3), {}, [1.64699212, 1.5830223]),
    "vit_tiny": ((16, 24, 3), {}, [1.847849, 1.84976402]),
}
"""For each network, its first logits for each sample and output.

Twins have computed them, except those of the last two, which are our own: the losses of resnet20
over five steps, and a smaller vision transformer with its gradients, were equal to PyTorch's.
"""


def waves(shape: tuple[int, ...], number: int) -> np.ndarray:
    """Values of [-1, 1] that are the same everywhere."""
    return np.sin(np.arange(np.prod(shape), dtype="float64") * (1 + 0.1 * number)).reshape(shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_a_twin_in_pytorch(name):
    shape, options, expected = NETWORKS[name]
    graph = Graph([shape], backend=create_backend("numpy"), dtype="float64")
    graph.add(create_net(name, 5, shape, **options), *graph.inputs)
    order = [p.name for node in graph.nodes for p in node.layer.parameters]  # before fusion
    model = Model(create_net(name, 5, shape, **options), shape, dtype="float64")
    for number, key in enumerate(order):
        values = model.parameters[key].master
        fan = max(np.prod(values.shape[1:]), 1)
        values[...] = (values.ndim == 1) + waves(values.shape, number) / fan**0.5
    model.refresh()
    y, _ = model.forward(waves((2, *shape), 0), StepContext(training=True, samples=np.arange(2)))
    found = [part[:, 0] for part in (y if isinstance(y, tuple) else (y,))]
    # the other order of sums in up to 100 layers of float64
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)
