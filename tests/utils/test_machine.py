"""Tests of `pydtnn.utils.machine`, on machines that are made up."""

from __future__ import annotations

import os
import platform
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from pydtnn.utils import machine
from pydtnn.utils.machine import cpu_model, cpu_name, cpu_quotas
from tests.each import each

X86 = """processor\t: 0
cpu family\t: 6
model\t\t: 207
model name\t: Some Processor

processor\t: 1
model name\t: Another Processor
"""

ARM = """processor\t: 0
CPU implementer\t: 0x41
CPU part\t: 0xd0c
"""


@each(
    ("text", "name", "model"),
    [
        (X86, "Some Processor", "Some Processor, cpu family 6, model 207"),
        (ARM, "arm chip", "arm chip, CPU implementer 0x41, CPU part 0xd0c"),
        ("", "arm chip", "arm chip"),
    ],
)
def test_a_cpu_is_known_by_its_name_and_numbers(
    text: str, name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "arm chip")
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (cpu_name(), cpu_model()) == (name, model)


def test_a_system_without_proc_tells_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_name() == cpu_model() == "riscv64"


def control_groups(folder: Path, groups: str, files: dict[str, str]) -> dict[str, Fraction]:
    """Quotas on a system that is made up, by the path of the group."""
    for name, text in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "groups").write_text(groups)
    found = cpu_quotas(folder / "groups", folder / "mounted")
    return {str(Path(name).relative_to(folder / "mounted")): n for name, n in found.items()}


def test_a_quota_of_a_control_group_and_of_its_parents_is_found(tmp_path: Path) -> None:
    files = {
        "cpu.max": "max 100000\n",
        "pod/cpu.max": "800000 100000\n",
        "pod/job/cpu.max": "150000 100000\n",
        "pod/other/cpu.max": "1000 100000\n",
    }
    assert control_groups(tmp_path, "0::/pod/job\n", files) == {
        "pod": Fraction(8),
        "pod/job": Fraction(3, 2),
    }


def test_a_quota_of_the_first_version_is_found_in_a_container_that_hides_its_path(
    tmp_path: Path,
) -> None:
    groups = "9:cpuset:/docker/1f\n4:cpu,cpuacct:/docker/1f\n3:memory:/docker/1f\n"
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/cpu.cfs_quota_us": "1\n",
    }
    assert control_groups(tmp_path, groups, files) == {"cpu,cpuacct": Fraction(5, 2)}


@each(
    "files",
    [
        {},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        {"cpu.max": "max 100000\n"},
        {"cpu.max": "nonsense\n"},
    ],
)
def test_no_quota_is_no_limit(files: dict[str, str], tmp_path: Path) -> None:
    assert control_groups(tmp_path, "4:cpu:/\n0::/\n", files) == {}
    assert cpu_quotas(tmp_path / "missing", tmp_path) == {}


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_one_process_takes_no_more_than_its_share_of_a_control_group(monkeypatch):
    monkeypatch.setattr(machine, "cores_here", lambda: [*range(64)])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "cpu_quotas", lambda: {"pod": Fraction(9, 2)})
    assert machine.default_threads() == 4
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert machine.default_threads() == 2


@each("wish", ["3", " 3 ", "3,2"])
def test_omp_num_threads_wins(monkeypatch, wish):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    assert machine.default_threads() == 3


@each("wish", ["0", "-1", "many", ","])
def test_omp_num_threads_that_is_no_number_is_refused(monkeypatch, wish):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS: expected a number from 1"):
        machine.default_threads()


def test_more_threads_than_a_process_bears_are_refused(monkeypatch):
    """A hundred thousand of OpenMP's end the interpreter."""
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS: expected a number from 1 to 1024"):
        machine.default_threads()


def test_blas_is_limited_as_long_as_one_wants():
    np.ones((2, 2)) @ np.ones((2, 2))  # loads the library

    def pools():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with machine.limit_blas_threads(2):
        assert pools() == {2}
        with machine.limit_blas_threads(1):
            assert pools() == {1}
        assert pools() == {2}


def test_ranks_of_a_host_share_its_cores_by_the_launchers_word(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "cores_here", lambda: list(range(os.cpu_count())))
    monkeypatch.setenv("MPI_LOCALNRANKS", str(2 * os.cpu_count()))
    assert machine.default_threads() == 1
    monkeypatch.setattr(machine, "cores_here", lambda: list(range(3)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert machine.default_threads() == 3  # pinned to cores of its own


def test_where_srun_does_not_say_how_many_are_here_cores_suffice_for_all(monkeypatch):
    monkeypatch.delenv("MPI_LOCALNRANKS", raising=False)
    monkeypatch.setattr(machine, "cores_here", lambda: list(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("PMI_SIZE", "4")
    assert machine.default_threads() == 2
