"""The report on the machine and the installation."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pydtnn
from pydtnn.cli import installation
from pydtnn.kernels.cuda import libraries
from pydtnn.tools import info
from tests.each import each


def test_what_is_collected_survives_json():
    found = installation.collect()
    assert json.loads(json.dumps(found)) == found
    assert found["pydtnn"] == pydtnn.__version__
    assert found["packages"]["numpy"]
    assert found["cpu"]["usable"] >= 1
    assert found["cpu"]["isa"] in found["cpu"]["instruction_sets"]


def test_collecting_without_probing_loads_neither_mpi4py_nor_cupy():
    code = "import sys; from pydtnn.cli.installation import collect; collect(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"mpi4py", "cupy"} & set(done.stdout.split())


def test_the_report_names_every_part():
    done = subprocess.run(
        [sys.executable, "-m", "pydtnn", "info"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ["pydtnn", "Python", "numpy", "CPU", "instruction", "tuning", "BLAS", "MPI", "GPU"]:
        assert f"\n{name}" in f"\n{done.stdout}"
    found = installation.collect() | {"packages": {"a": "1", "b": None}, "mpi": "", "gpu": {}}
    assert info._lines(found)[2:4] == [("a", "1"), ("b", "not installed")]


@each("missing", ["mpi4py", "cupy"])
def test_a_missing_package_is_a_reason_and_no_error(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)  # the import system then raises ImportError
    report = {"mpi4py": installation._mpi, "cupy": lambda: installation._gpu()["GPU"]}[missing]()
    assert report.startswith("none: ")
    assert missing in report


def test_gpus_are_told_with_their_libraries_and_what_is_missing(monkeypatch):
    told = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 139 * 2**30}
    numbers = {"getDeviceCount": 2, "driverGetVersion": 13010, "runtimeGetVersion": 13000}
    runtime = SimpleNamespace(**{name: lambda n=n: n for name, n in numbers.items()})
    runtime.getDeviceProperties = lambda number: told
    cupy = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(libraries, "usable_cupy", lambda: cupy)

    def load(name):
        if name == "nccl":
            raise libraries.Unavailable("NCCL was not found in wheels, conda or the system")
        return SimpleNamespace(version=(9, 19, 0), path=f"/usr/lib/lib{name}.so")

    monkeypatch.setattr(libraries, "load", load)
    found = installation._gpu()
    assert found["GPU"] == "NVIDIA H200 (sm_90, 139 GiB); NVIDIA H200 (sm_90, 139 GiB)"
    assert found["CuPy"] == "14.2.0 for CUDA 13.0, driver for CUDA 13.1"
    assert found["NCCL"] == "none: NCCL was not found in wheels, conda or the system"
    assert found[libraries.REQUIREMENTS["cudnn"].title] == "9.19.0 in /usr/lib/libcudnn.so"


def test_an_impossible_number_of_threads_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert info.main([]) == 1
    printed, told = capsys.readouterr()
    assert printed == ""
    assert re.fullmatch(r"pydtnn info: .*OMP_NUM_THREADS.*'many'.*\n", told)


def test_a_package_in_another_projects_checkout_has_no_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    module = tmp_path / "environment" / "pydtnn" / "cli" / "installation.py"
    monkeypatch.setattr(installation, "__file__", str(module))
    assert installation._commit() is None
