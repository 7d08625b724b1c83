"""Finding the libraries of a GPU: what is said where one of them is missing or does not fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.libraries import WANTED, Library, Unavailable


class CUDARuntimeError(RuntimeError):
    """Like CuPy's."""


def fake_cupy(*, gpus: int = 1, driver: int = 13000, memory: bool = True) -> Any:
    """A CuPy for CUDA 13 on a machine with some GPUs."""

    def count() -> int:
        if driver < 13000:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")
        if not gpus:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return gpus

    def malloc(size: int) -> int:
        if not memory:
            raise CUDARuntimeError(
                "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy"
            )
        return size

    module: Any = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda: 13000,
            getDeviceCount=count,
            malloc=malloc,
            free=lambda pointer: None,
        ),
        Device=lambda number: SimpleNamespace(use=lambda: None),
    )
    return module


@pytest.mark.parametrize("name", WANTED)
def test_libraries_that_are_installed_are_found_with_their_version(name: str) -> None:
    try:
        library = libraries.load(name)
    except Unavailable as error:
        pytest.skip(str(error))
    assert library.version >= WANTED[name].oldest
    assert library.title in str(library)


def test_a_library_that_does_not_fit_is_named_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    wanted, install = WANTED["cudnn"], "install it with 'pip'"
    old = Library("cuDNN", (8, 9, 7), "/opt/libcudnn.so.8", None)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=r"cuDNN 8.9.7 in /opt/\S+ is too old: .* 9.0.0 or newer"):
        libraries.checked(wanted, old, 13, install)
    new = replace(old, version=(9, 0, 0))
    with pytest.raises(Unavailable, match="was built for CUDA 12 and CuPy for CUDA 13; install it"):
        libraries.checked(wanted, new, 12, install)
    assert libraries.checked(wanted, new, 13, install) is new


def test_a_library_that_is_missing_is_named_with_the_package_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(name: str) -> Any:
        raise RuntimeError(f'Failure finding "lib{name}.so"\n  listdir("/usr/lib"):')

    finder: Any = ModuleType("cuda.pathfinder")
    finder.load_nvidia_dynamic_lib = nowhere
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    for name, package in [("cudnn", "nvidia-cudnn-cu13"), ("cublas", "nvidia-cublas")]:
        with pytest.raises(Unavailable, match=f"was not found .* 'pip install {package}'") as error:
            libraries.load.__wrapped__(name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ({"driver": 0}, "no NVIDIA driver is installed here"),
        ({"driver": 12080}, r"driver supports CUDA 12 only; install 'pydtnn\[cuda12\]'"),
        ({"gpus": 0}, "no GPU can be used .cudaErrorNoDevice.*CUDA_VISIBLE_DEVICES"),
        ({"memory": False}, "no GPU can be used .*busy"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(**machine))
    with pytest.raises(Unavailable, match=sentence):
        create_backend("cuda")


def test_a_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(gpus=2))
    assert libraries.usable_cupy(1) is sys.modules["cupy"]
    with pytest.raises(ValueError, match="there is no GPU 2; this process sees 2"):
        create_backend("cuda", device=2)


def test_a_missing_cupy_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Unavailable, match=r"needs CuPy: install it .*pydtnn\[cuda13\]"):
        create_backend("cuda")


def test_a_setting_of_tf32_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDTNN_TF32", "yes")
    with pytest.raises(ValueError, match="PYDTNN_TF32 must be 0 or 1, not 'yes'"):
        create_backend("cuda")
