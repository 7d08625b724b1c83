"""Which communicator a process gets, as its environment says."""

import sys

import pytest

from pydtnn.comm import create_communicator
from pydtnn.utils.launcher import _RANK_VARIABLES, _SIZE_VARIABLES, launched, launched_ranks
from tests.launch import is_openmpi


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*_RANK_VARIABLES, *_SIZE_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def test_a_process_by_itself_is_serial_and_needs_no_mpi4py(no_mpi4py):
    assert create_communicator(timeout=0).size == 1  # without a limit
    with pytest.raises(ValueError, match=r"timeout must be at least 0 s, got -1"):
        create_communicator("serial", timeout=-1)
    assert not launched()
    assert launched_ranks() is None


def test_a_launcher_is_recognised_by_what_it_sets(monkeypatch):
    for name in _RANK_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert launched()
    for name in _SIZE_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert launched_ranks() == 3
            for text in ("x", "0", "-1", "2.5"):
                patch.setenv(name, text)
                with pytest.raises(
                    ValueError, match=f"^{name}: expected a positive number.*'{text}"
                ):
                    launched_ranks()


def test_a_launcher_without_mpi4py_is_no_excuse_for_many_serial_runs(monkeypatch, no_mpi4py):
    with pytest.raises(ImportError, match=r"^mpi: mpi4py cannot be imported .*pip install"):
        create_communicator("mpi")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ImportError, match="mpi4py cannot be imported"):
        create_communicator()


def test_srun_without_mpi_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match=r"srun: expected tasks with MPI, got 4 .*--mpi=pmix"):
        create_communicator()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "x")
    with pytest.raises(ValueError, match="^SLURM_STEP_NUM_TASKS: expected a positive number"):
        create_communicator()
    with pytest.raises(ValueError, match=r"unknown communicator 'mpj'"):
        create_communicator("mpj")


def test_a_missing_mpi_is_told_once_on_a_host(mpiexec, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI')")
    environment = {"PYTHONPATH": str(tmp_path)}
    finished = mpiexec(2, ["-m", "pydtnn.train"], environment=environment)
    assert finished.returncode != 0
    assert finished.stderr.count("mpi: mpi4py cannot be imported (no MPI)") == 1


def test_the_launcher_of_another_mpi_is_named(mpiexec):
    # One rank under the right launcher, made to look like one of four of the other.
    variables = {"PMI_SIZE": "4"} if is_openmpi() else {"OMPI_COMM_WORLD_SIZE": "4"}
    program = (
        "import os; from pydtnn.comm import create_communicator; "
        f"[os.environ.pop(name, None) for name in {_SIZE_VARIABLES}]; "
        f"os.environ.update({variables}); create_communicator('mpi')"
    )
    finished = mpiexec(1, ["-c", program])
    assert finished.returncode == 1
    assert "mpi: the launcher" in finished.stderr
    assert "start with the mpiexec that belongs to it" in finished.stderr
