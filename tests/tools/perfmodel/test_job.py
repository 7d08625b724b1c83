from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pydtnn import run_threads
from pydtnn.comm import Serial
from pydtnn.kernels import create_backend
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.tools.perfmodel import job
from pydtnn.tools.perfmodel.calibration import Calibration, calibrate, rates
from pydtnn.tools.perfmodel.compute.profile import Profile
from pydtnn.tools.perfmodel.job import platform_of, predict_job
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.training.workload import Workload
from tests.each import each

NET = Sequential(Conv2d(4, 3), BatchNorm(), ReLU(), Flatten(), Linear(3))
WORK = Workload(NET, (8, 8, 3), 3, batch=4)


@pytest.fixture(autouse=True)
def small_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "WIDTH", 64)


def test_ranks_of_a_host_are_one_platform_with_positive_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))

    def rank(comm):
        return platform_of(comm, create_backend("cpu", threads=1), WORK)

    found = run_threads(2, rank)
    assert found[0] == found[1]
    platform = found[0]
    assert (platform.cluster.hosts, platform.cluster.ranks_per_host) == (1, 2)
    compute = platform.compute
    assert min(compute.peak["float32"], compute.memory_bandwidth, compute.step) > 0
    assert compute.call >= 0  # 0: a difference of times under load
    assert min(platform.storage.loader, platform.messages.inside.bandwidth) > 0


def test_a_platform_is_measured_once_and_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    backend = create_backend("cpu", threads=1)
    monkeypatch.setattr(job, "calibrate", lambda *a, **k: replace(calibrate(*a, **k), spreads=()))
    first = platform_of(Serial(), backend, WORK)
    (file,) = tmp_path.glob("platform-*.yaml")
    assert {name.rpartition(", ")[2] for name in first.compute.rates} == {"forward", "backward"}
    assert any(name.startswith("linear") for name in first.compute.rates)
    for one in (WORK, replace(WORK, batch=16)):  # without rates it is that of all networks
        platform_of(Serial(), backend, one, rates=False)
        assert len([*tmp_path.glob("platform-*.yaml")]) == 2
    monkeypatch.setattr(job, "calibrate", None)
    again = platform_of(Serial(), backend, WORK)
    assert again.compute.peak["float32"] == pytest.approx(first.compute.peak["float32"], rel=1e-3)
    other = Calibration(replace(first, name="again"), "", "", (), ())
    monkeypatch.setattr(job, "calibrate", lambda *_, **__: other)
    file.write_text("no platform")
    assert platform_of(Serial(), backend, WORK).name == "again"


def test_a_platform_that_is_measured_under_load_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    noisy = Calibration(Platform.load("laptop"), "", "", ("layers by 40 %",), ())
    monkeypatch.setattr(job, "calibrate", lambda *_, **__: noisy)
    assert platform_of(Serial(), create_backend("cpu", threads=1), WORK) == noisy.platform
    assert not [*tmp_path.iterdir()]


@each("axis", ["data", "pipeline"])
def test_a_job_is_predicted_with_the_compute_of_its_own_plan(axis, monkeypatch):
    """Rank 0 has the prediction, of all ranks and with all of its time in steps of 10 s a pass."""
    work = replace(WORK, batch=8, axes={axis: 2}, micro_batches=2 if axis == "pipeline" else None)
    real = job.measure_job

    def slow(*arguments: Any, **options: Any) -> Profile:
        found = real(*arguments, **options)
        ranks = (
            replace(own, steps=tuple(dict.fromkeys(step, 10.0) for step in own.steps))
            for own in found.ranks
        )
        return Profile(tuple(ranks))

    monkeypatch.setattr(job, "measure_job", slow)
    monkeypatch.setattr(job, "MAX_SPREAD", math.inf)
    first, second = run_threads(2, lambda comm: predict_job(comm, work, Platform.load("laptop")))
    assert second is None
    assert len(first.ranks) == 2
    assert first.seconds > 100
    assert first.step.compute / first.seconds > 0.3
    assert first.memory.total > 1e6


def test_measured_steps_do_not_diverge(monkeypatch):
    """With a learning rate of 1e6, an ordinary second step has a loss that is not finite."""
    monkeypatch.setattr(job, "MAX_SPREAD", math.inf)
    work = replace(WORK, axes={"data": 1}, optimizer_options={"lr": 1e6, "momentum": 0.9})
    assert predict_job(Serial(), work, Platform.load("laptop")).seconds > 0
    monkeypatch.setattr(job, "MAX_SPREAD", -1.0)
    with pytest.raises(ValueError, match="the machine is busy"):
        predict_job(Serial(), work, Platform.load("laptop"))
