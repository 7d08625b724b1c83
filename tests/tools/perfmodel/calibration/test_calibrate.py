"""Calibration on this machine, with and without other work on it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from pydtnn.comm import Serial, run_threads
from pydtnn.kernels import create_backend
from pydtnn.kernels.dry import dry_backend
from pydtnn.model import Model
from pydtnn.tools.perfmodel.calibration import __main__ as command
from pydtnn.tools.perfmodel.calibration import machine, messages, rates
from pydtnn.tools.perfmodel.calibration.calibrate import Calibration, calibrate
from pydtnn.tools.perfmodel.calibration.messages import measure_messages
from pydtnn.tools.perfmodel.calibration.sample import Sample
from pydtnn.tools.perfmodel.compute.classes import classify
from pydtnn.tools.perfmodel.entries import KernelClass
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.tools.perfmodel.small import small_work

QUIET = Calibration(Platform.load("laptop"), "avx2", "a CPU", (), ("messages.between",))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: Any) -> list[Calibration]:
    """What two ranks measure, without the rates of layers."""
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "WIDTH", 64)
        patch.setitem(calibrate.__globals__, "MAX_EXCHANGE_S", 1e9)  # others may use the cores
        return run_threads(
            2, lambda comm: calibrate(comm, threads=1, folder=folder, networks=lambda *_: ())
        )


def test_a_measured_platform_is_complete_and_that_of_all_ranks(measured, tmp_path):
    found, other = measured
    assert found == other
    found.save(tmp_path / "x.yaml")
    loaded = Platform.load(tmp_path / "x.yaml")
    assert loaded.cluster.ranks_per_host == 2
    assert loaded.cluster.hosts == 1
    assert {*loaded.compute.peak} >= {"float32", "float64"}
    assert min(loaded.compute.peak.values()) > 0
    assert loaded.compute.host_bandwidth <= 2.01 * loaded.compute.memory_bandwidth
    assert loaded.messages.inside.latency > 0
    assert loaded.storage.write > 0
    assert loaded.storage.loader > 0


def test_what_one_host_cannot_measure_is_named_in_the_file(measured, tmp_path, monkeypatch):
    assert measured[0].assumed == ("messages.between",)
    monkeypatch.setattr(messages, "measure_addition", lambda comm: 2**-30)
    found, missing = measure_messages(Serial(), Platform.load("laptop").messages)
    assert found.add == 2**30
    assert missing == ["messages.inside", "messages.between", "messages.call"]
    measured[0].save(tmp_path / "x.yaml")
    assert (
        "Not measured, replace by figures of your own: messages.between."
        in (tmp_path / "x.yaml").read_text()
    )


def test_a_type_whose_kernels_have_not_been_compiled_has_no_peak(monkeypatch):
    """As after `make demo`."""

    def product(backend: Any, dtype: str, *_: object) -> Sample:
        if dtype == "float64":
            raise RuntimeError("the kernels for float64 have not been compiled")
        return Sample(dtype, (1.0, 1.0))

    monkeypatch.setattr(machine, "product", product)
    monkeypatch.setattr(rates, "WIDTH", 64)
    found = calibrate(Serial(), threads=1, networks=lambda *_: ())
    assert set(found.platform.compute.peak) == {"float32"}


def test_an_unknown_instruction_set_is_an_error_on_all_ranks():
    with pytest.raises(AgreedError, match="isa must be an instruction set that this machine has"):
        run_threads(2, lambda comm: calibrate(comm, isa="avx9"))


def run(monkeypatch: pytest.MonkeyPatch, found: Calibration, *arguments: str) -> int:
    monkeypatch.setattr(command, "calibrate", lambda comm, **options: found)
    return command.main(arguments)


def test_the_command_writes_a_file_and_under_load_only_if_it_is_allowed(
    monkeypatch, tmp_path, capsys
):
    path, noisy = tmp_path / "here.yaml", replace(QUIET, spreads=("copy in memory by 80 %",))
    assert run(monkeypatch, noisy, "--output", str(path)) == 1
    assert "under load, spread of copy in memory by 80 %" in capsys.readouterr().err
    assert not path.exists()
    assert run(monkeypatch, QUIET, "--output", str(path)) == 0
    assert Platform.load(path) == QUIET.platform
    assert f"written to {path}" in capsys.readouterr().out
    assert run(monkeypatch, noisy, "--output", str(path), "--allow-noise") == 0
    assert "# The machine was under load, spread of copy in memory by 80 %." in path.read_text()


@each("arguments", [[], ["--output", "x.txt"], ["--output", "x.yaml", "--threads", "0"]])
def test_wrong_options_are_one_sentence(arguments, capsys):
    assert command.main(arguments) == 1
    error = capsys.readouterr().err
    assert "--output" in error or "threads must be at least 1" in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_the_loader_takes_a_time_for_each_sample_and_for_its_bytes(monkeypatch):
    monkeypatch.setattr(machine, "_load", lambda size, samples: 1e-3 + 4 * 3 * size**2 / 1e8)
    assert machine.loader_rates() == pytest.approx((1e-3, 1e8))


def test_a_job_that_cannot_begin_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(command, "create_communicator", Mock(side_effect=ValueError("no MPI")))
    assert (command.main([]), capsys.readouterr().err) == (1, "calibrate: no MPI\n")


@pytest.mark.long
def test_ranks_of_a_job_measure_messages_between_them(tmp_path, mpiexec):
    path = tmp_path / "x.yaml"
    command = ["-m", "pydtnn", "calibrate", f"--output={path}", "--threads=1", "--allow-noise"]
    done = mpiexec(2, command)
    assert done.returncode == 0, done.stderr
    platform = Platform.load(path)
    assert platform.cluster.ranks_per_host == 2
    measured = "messages, which waited for cores" not in done.stdout  # the case on a loaded machine
    assert (platform.messages.inside != Platform.load("laptop").messages.inside) is measured
    assert platform.messages.inside.shared > 0
    assert "conv 3x3 fused, 64, forward" in platform.compute.rates
    assert f"written to {path}" in done.stdout


def test_rates_are_those_of_the_common_classes_of_each_number_of_channels():
    backend, found = dry_backend(create_backend("cpu", threads=1), 1), Counter[KernelClass]()
    for _, net, shape, _ in rates._nets():
        nodes = Model(net, shape, backend=backend).graph.nodes
        found.update(classify(node.layer) for node in nodes if node.inputs)
    usual = {"3x3 fused": 2, "1x1 fused": 2, "other fused": 1, "3x3": 2, "1x1": 1, "other": 1}
    for channels in (32, 64, 128, 256, 512):
        assert {name: found[KernelClass(f"conv {name}", channels)] for name in usual} == usual
    assert {one.size for one in found if one.name == "linear"} == {64, 181, 512, 1024, 2048}


def test_ranks_begin_each_measured_step_together():
    waited: list[int] = []
    networks = partial(rates.training, "steps", small_work(4))
    backend = create_backend("cpu", threads=1)
    found = rates.measure_rates(backend, lambda: waited.append(1), networks, 3, time.perf_counter)
    assert len(waited) == (2 + 30) + (2 + 3)  # of Python, and of the network
    assert found.passes[0].shape[0] == 3
