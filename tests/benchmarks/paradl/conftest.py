from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paradl import LayerList, read_network
from pydtnn.perfmodel.platform import Platform
from tests.benchmarks.paradl.networks import ALEXNET, COSMOFLOW, cosmoflow256, resnet50, vgg16


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
def alexnet(tmp_path: Path) -> LayerList:
    (tmp_path / "alexnet.net").write_text(ALEXNET)
    return read_network(tmp_path / "alexnet.net")


@pytest.fixture
def vgg(tmp_path: Path) -> LayerList:
    (tmp_path / "vgg.net").write_text(vgg16())
    return read_network(tmp_path / "vgg.net")


@pytest.fixture
def resnet(tmp_path: Path) -> LayerList:
    (tmp_path / "resnet.net").write_text(resnet50())
    return read_network(tmp_path / "resnet.net")


@pytest.fixture
def cosmoflow(tmp_path: Path) -> dict[int, LayerList]:
    """The network for 512 and 256 values along each axis, with two convolutions divided."""
    found = {}
    for size, text in {512: COSMOFLOW, 256: cosmoflow256()}.items():
        (path := tmp_path / f"cosmoflow{size}.net").write_text(text)
        network = read_network(path)
        divided = ("CONV_1", "CONV_2")
        found[size] = network.with_split([x.name in divided for x in network.layers])
    return found


def convolutions(network: LayerList, *kinds: str) -> LayerList:
    """Divide the convolutions, and layers of further kinds."""
    return network.with_split([x.name.startswith(("CONV", *kinds)) for x in network.layers])
