from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paradl import LayerList, read_network
from pydtnn.tools.perfmodel.platform import Platform
from tests.benchmarks.paradl.networks import ALEXNET, cosmoflow, resnet50, vgg16


@pytest.fixture
def abci() -> Platform:
    return Platform.load("abci")


@pytest.fixture
def slower(abci: Platform) -> Platform:
    """The platform of the projections of hybrids: 20 us instead of 15 us to a PCIe switch."""
    m = abci.messages
    classes = tuple(replace(c, latency=c.latency + 1e-5) for c in m.classes)
    between = replace(m.between, latency=m.between.latency + 1e-5)
    return replace(abci, messages=replace(m, between=between, classes=classes))


@pytest.fixture
def nets(tmp_path: Path) -> dict[str, LayerList]:
    """The published networks; those of CosmoFlow have two convolutions divided."""
    found = {}
    texts = {"alexnet": ALEXNET, "vgg": vgg16(), "resnet": resnet50()}
    for name, text in {**texts, **{f"cosmoflow_{n}": cosmoflow(n) for n in (256, 512)}}.items():
        (path := tmp_path / f"{name}.net").write_text(text)
        found[name] = network = read_network(path)
        if "cosmoflow" in name:
            divided = [x.name in ("CONV_1", "CONV_2") for x in network.layers]
            found[name] = network.with_split(divided)
    return found


def convolutions(network: LayerList, *kinds: str) -> LayerList:
    """Divide the convolutions, and layers of further kinds."""
    return network.with_split([x.name.startswith(("CONV", *kinds)) for x in network.layers])
