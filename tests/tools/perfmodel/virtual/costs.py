"""Compute times for tests, and networks."""

from __future__ import annotations

from pydtnn.layers.base import Layer
from pydtnn.tools.perfmodel.compute.base import ComputeCosts, Label
from pydtnn.tools.perfmodel.network import Network

SECONDS = {"forward": 1e-3, "backward": 2e-3}


class UniformCosts(ComputeCosts):
    """A fixed time per sample and pass of a layer; phases take none."""

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        pass_seconds = label.share * SECONDS.get(label.kind, 0.0)
        return pass_seconds * batch if label.index == 0 else 0.0


def cluster(hosts: str) -> Network:
    return Network.create(
        hosts, latency=1e-4, bandwidth=1.25e8, local_latency=1e-6, local_bandwidth=1e10
    )
