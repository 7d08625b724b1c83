from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pydtnn import run_threads
from pydtnn.comm import Serial
from pydtnn.kernels import create_backend
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.perfmodel import quick
from pydtnn.perfmodel.calibration import Calibration, rates
from pydtnn.perfmodel.quick import platform_of

NET = Sequential(Conv2d(4, 3), BatchNorm(), ReLU(), Flatten(), Linear(3))


@pytest.fixture(autouse=True)
def small_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "WIDTH", 64)


def test_ranks_of_a_host_are_one_platform_with_positive_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))

    def rank(comm):
        return platform_of(comm, create_backend("cpu", threads=1), NET, (8, 8, 3), 4)

    found = run_threads(2, rank)
    assert found[0] == found[1]
    platform = found[0]
    assert (platform.cluster.hosts, platform.cluster.ranks_per_host) == (1, 2)
    assert platform.compute.peak["float32"] > 1e8
    assert platform.compute.memory_bandwidth > 1e7
    assert 0 < platform.compute.call < 0.1
    assert platform.compute.step > 0
    assert platform.storage.loader > 0
    assert platform.messages.inside.bandwidth > 1e5


def test_a_platform_is_measured_once_and_kept_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    backend = create_backend("cpu", threads=1)
    first = platform_of(Serial(), backend, NET, (8, 8, 3), 4)
    (file,) = tmp_path.glob("platform-*.yaml")

    assert {name.rpartition(", ")[2] for name in first.compute.rates} == {"forward", "backward"}
    assert any(name.startswith("linear") for name in first.compute.rates)

    def twice(*_: object, **__: object) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(quick, "calibrate", twice)
    again = platform_of(Serial(), backend, NET, (8, 8, 3), 4)
    assert again.compute.peak["float32"] == pytest.approx(first.compute.peak["float32"], rel=1e-3)
    other = Calibration(replace(first, name="again"), "", "", (), ())
    monkeypatch.setattr(quick, "calibrate", lambda *_, **__: other)
    file.write_text("no platform")
    assert platform_of(Serial(), backend, NET, (8, 8, 3), 4).name == "again"
