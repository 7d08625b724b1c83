"""Finding the libraries of a GPU: what is said where one of them is missing or does not fit."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda import find, libraries
from pydtnn.kernels.cuda.libraries import REQUIREMENTS, Library, Unavailable


class CUDARuntimeError(RuntimeError):
    """Like CuPy's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def fake_cupy(
    *,
    gpus: int = 1,
    driver: int = 13000,
    runtime: int = 13000,
    memory: bool = True,
    capability: str = "90",
) -> Any:
    """A CuPy on a machine with some GPUs."""

    def count() -> int:
        if driver < runtime:
            raise CUDARuntimeError(35, "cudaErrorInsufficientDriver: driver is insufficient")
        if not gpus:
            raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
        return gpus

    def malloc(size: int) -> int:
        if not memory:
            raise CUDARuntimeError(46, "cudaErrorDevicesUnavailable: device(s) is/are busy")
        return size

    module: Any = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda: runtime,
            getDeviceCount=count,
            malloc=malloc,
            free=lambda pointer: None,
        ),
        Device=lambda number: SimpleNamespace(
            use=lambda: None, id=number or 0, compute_capability=capability
        ),
    )
    return module


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_libraries_that_are_installed_are_found_with_their_version(name):
    try:
        library = libraries.load(name)
    except Unavailable as error:
        pytest.skip(str(error))
    assert library.version >= REQUIREMENTS[name].oldest
    assert library.title in str(library)


def test_a_library_that_does_not_fit_is_named_with_what_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    wanted, install = REQUIREMENTS["cudnn"], "install it with 'pip'"
    old = Library("cuDNN", (8, 9, 7), "/opt/libcudnn.so.8", None)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=r"cuDNN 8.9.7 in /opt/\S+ is too old: .* 9.0.0 or newer"):
        libraries.checked(wanted, old, 13, install)
    new = replace(old, version=(9, 0, 0))
    with pytest.raises(Unavailable, match="was built for CUDA 12 and CuPy for CUDA 13; install it"):
        libraries.checked(wanted, new, 12, install)
    assert libraries.checked(wanted, new, 13, install) is new


SOURCES = {
    "cudnn": """
        unsigned long cudnnGetVersion() { return %d; }
        unsigned long cudnnGetCudartVersion() { return %d000; }
    """,
    "nvrtc": """
        int nvrtcVersion(int *a, int *b) {
            int v = %d;
            *a = v / 10000, *b = v / 100 %% 100;
            return %d - %d;
        }
    """,
}


def build(folder: Path, name: str, number: int, version: int, cuda: int) -> None:
    """Compile a library that knows its version, and no more."""
    folder.mkdir(parents=True)
    values = (version, cuda) if name == "cudnn" else (version, cuda, cuda)
    command = ["g++", "-xc", "-", "-shared", "-fPIC", "-o", str(folder / f"lib{name}.so.{number}")]
    subprocess.run(command, input=(SOURCES[name] % values).encode(), check=True)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Python without wheels of NVIDIA's, conda or a toolkit; a folder for some."""
    places: list[str] = [str(tmp_path / "nvidia")]
    spec = SimpleNamespace(submodule_search_locations=places)
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'compiler' / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "compiler" / "bin").mkdir(parents=True)
    nvcc = tmp_path / "compiler" / "bin" / "nvcc"
    nvcc.write_text("")
    nvcc.chmod(0o755)
    for variable in ("CONDA_PREFIX", *find.HOMES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    return tmp_path


def test_a_library_that_is_missing_is_named_with_the_package_that_brings_it(
    nothing_installed, monkeypatch
):
    packages = {
        13000: ("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13"),
        12090: ("nvidia-cudnn-cu12", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc-cu12"),
    }

    def nowhere(path: str) -> Any:
        raise OSError(f"{path}: cannot open shared object file\nand more")

    monkeypatch.setattr(libraries.ctypes, "CDLL", nowhere)
    for runtime, names in packages.items():
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(runtime=runtime))
        for name, package in zip(("cudnn", "cublas", "nvrtc", "nccl"), names, strict=False):
            with pytest.raises(Unavailable, match=f"was not found .* 'pip install {package}'") as e:
                libraries.load.__wrapped__(name)
            assert "\n" not in str(e.value)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@needs_compiler
@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("nvidia/cudnn/lib", None),
        ("nvidia/cu13/lib", None),
        ("conda/lib", "CONDA_PREFIX"),
        ("python/lib", None),
        ("toolkit/lib64", "CUDA_HOME"),
        ("compiler/lib64", None),
    ],
)
def test_libraries_are_found_in_wheels_in_conda_and_in_a_toolkit(
    nothing_installed, monkeypatch, place, variable
):
    folder = nothing_installed / place
    build(folder, "cudnn", 9, 91900, 13)
    if variable:
        monkeypatch.setenv(variable, str(folder.parent))
    library = libraries.load.__wrapped__("cudnn")
    assert str(library) == "cuDNN 9.19.0"
    assert library.path == str(folder / "libcudnn.so.9")


@needs_compiler
def test_wheels_come_before_a_toolkit_and_a_broken_file_is_passed_over(
    nothing_installed, monkeypatch
):
    build(nothing_installed / "toolkit" / "lib64", "nvrtc", 12, 120000, 12)
    wheel = nothing_installed / "nvidia" / "cuda_nvrtc" / "lib"
    monkeypatch.setenv("CUDA_PATH", str(nothing_installed / "toolkit"))
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(runtime=12090))
    wheel.mkdir(parents=True)
    (wheel / "libnvrtc.so.12").write_text("no library")
    assert "toolkit" in libraries.load.__wrapped__("nvrtc").path
    (wheel / "libnvrtc.so.12").unlink()
    wheel.rmdir()
    build(wheel, "nvrtc", 12, 120000, 12)
    assert libraries.load.__wrapped__("nvrtc").path.startswith(str(wheel))
    build(nothing_installed / "nvidia" / "cudnn" / "lib", "cudnn", 9, 91900, 13)
    with pytest.raises(Unavailable, match="was built for CUDA 13 and CuPy for CUDA 12; install it"):
        libraries.load.__wrapped__("cudnn")


@needs_compiler
def test_nvrtc_opens_its_builtins_by_name_wherever_they_are(nothing_installed):
    """The wheels for CUDA 13.0 find them only if they have been loaded."""
    wheel, name = nothing_installed / "nvidia" / "cu13" / "lib", "libnvrtc-builtins.so.13.99"
    build(wheel, "nvrtc", 13, 139900, 13)
    link = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(wheel / name)]
    subprocess.run(["g++", "-xc", "-", *link], input=b"", check=True)
    with pytest.raises(OSError, match="cannot open"):
        ctypes.CDLL(name)
    assert str(libraries.load.__wrapped__("nvrtc")) == "NVRTC 13.99.0"
    assert ctypes.CDLL(name)


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ({"driver": 0}, "no NVIDIA driver is installed here"),
        ({"driver": 12080}, "driver supports CUDA 12 only; install cupy-cuda12x or a newer"),
        ({"gpus": 0}, "no GPU can be used .cudaErrorNoDevice.*CUDA_VISIBLE_DEVICES"),
        ({"memory": False}, "the GPU is taken by another process .*busy.*CUDA_VISIBLE_DEVICES"),
        ({"capability": "61"}, "GPU 0 has compute capability 6.1, and pydtnn needs 7.0 or newer"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_in_one_sentence(monkeypatch, machine, sentence):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(**machine))
    with pytest.raises(Unavailable, match=sentence):
        create_backend("cuda")


def test_a_missing_cupy_gpu_and_setting_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(gpus=2))
    assert libraries.usable_cupy(1) is sys.modules["cupy"]
    with pytest.raises(ValueError, match="there is no GPU 2; this process sees 2"):
        create_backend("cuda", device=2)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Unavailable, match="needs CuPy: install it with `pip install cupy-cuda13x`"):
        create_backend("cuda")
    monkeypatch.setenv("PYDTNN_TF32", "yes")
    with pytest.raises(ValueError, match="PYDTNN_TF32 must be 0 or 1, not 'yes'"):
        create_backend("cuda")
