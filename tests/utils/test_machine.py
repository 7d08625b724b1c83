"""Tests of `pydtnn.utils.machine`, on machines that are made up."""

import os
import platform
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

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
def test_a_cpu_is_known_by_its_name_and_numbers(text, name, model, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "arm chip")
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (cpu_name(), cpu_model()) == (name, model)


def test_a_system_without_proc_tells_the_architecture(monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    assert cpu_name() == cpu_model() == "riscv64"


@each(
    ("groups", "files", "quotas"),
    [
        (  # of the group and of its parents
            "0::/pod/job\n",
            {
                "cpu.max": "max 100000\n",
                "pod/cpu.max": "800000 100000\n",
                "pod/job/cpu.max": "150000 100000\n",
                "pod/other/cpu.max": "1000 100000\n",
            },
            {"pod": Fraction(8), "pod/job": Fraction(3, 2)},
        ),
        (  # of the first version, in a container that hides its path
            "9:cpuset:/docker/1f\n4:cpu,cpuacct:/docker/1f\n3:memory:/docker/1f\n",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "memory/cpu.cfs_quota_us": "1\n",
            },
            {"cpu,cpuacct": Fraction(5, 2)},
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, {}),
        ("0::/\n", {"cpu.max": "nonsense\n"}, {}),
    ],
)
def test_quotas_of_control_groups_are_found(groups, files, quotas, tmp_path):
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "groups").write_text(groups)
    found = cpu_quotas(tmp_path / "groups", tmp_path / "mounted")
    assert {str(Path(n).relative_to(tmp_path / "mounted")): q for n, q in found.items()} == quotas
    assert cpu_quotas(tmp_path / "missing", tmp_path) == {}


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MPI_LOCALNRANKS", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_takes_no_more_than_its_share_of_a_control_group(monkeypatch):
    monkeypatch.setattr(machine, "available_cores", lambda: [*range(64)])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "cpu_quotas", lambda: {"pod": Fraction(9, 2)})
    assert machine.default_threads() == 4
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert machine.default_threads() == 2


def test_omp_num_threads_wins_and_is_a_number(monkeypatch):
    """A hundred thousand threads of OpenMP end the interpreter."""
    for wish in ("3", " 3 ", "3,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", wish)
        assert machine.default_threads() == 3
    for wish in ("0", "-1", "many", ",", "100000"):
        monkeypatch.setenv("OMP_NUM_THREADS", wish)
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


@each(
    ("ranks", "here", "cores", "threads"),
    [
        ({"MPI_LOCALNRANKS": "8"}, 4, 4, 1),
        ({"MPI_LOCALNRANKS": "8"}, 3, 64, 3),  # pinned to cores of its own
        ({"PMI_SIZE": "4"}, 8, 8, 2),  # srun does not say how many are here
    ],
)
def test_ranks_of_a_host_share_its_cores(monkeypatch, ranks, here, cores, threads):
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "available_cores", lambda: list(range(here)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert machine.default_threads() == threads
