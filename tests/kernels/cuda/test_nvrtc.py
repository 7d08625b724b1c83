"""Our CUDA sources and NVRTC, CUDA's compiler at run time, which takes less than nvcc does."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.module import NVRTC_OPTIONS, compile_with_nvrtc, source_files

NAME, ARCH = "norm", "sm_90"  # with generic lambdas, which NVRTC 13.0 refuses unless told


class NVRTCError(RuntimeError):
    """What CuPy raises."""


class StandIn(ModuleType):
    """``cupy_backends.cuda.libs.nvrtc``, which compiles nothing."""

    NVRTCError = NVRTCError

    def __init__(self, broken: bool) -> None:
        super().__init__("nvrtc")
        self.broken, self.programs = broken, 0
        self.given: dict[str, Any] = {}

    def createProgram(self, text: str, name: str, headers: list[bytes], names: list[bytes]) -> int:
        self.programs += 1
        self.given |= {
            "text": text,
            "name": name,
            "headers": dict(zip(names, headers, strict=True)),
        }
        return 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.given["options"] = options
        if self.broken:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getCUBIN(self, program: int) -> bytes:
        return b"cubin"

    def getProgramLog(self, program: int) -> str:
        return "norm.cu(20): error"

    def destroyProgram(self, program: int) -> None:
        self.programs -= 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StandIn:
    made = StandIn(broken=request.param)
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["cupy_backends.cuda.libs"], "nvrtc", made, raising=False)
    return made


@pytest.mark.parametrize("stand_in", [False], indirect=True)
def test_a_source_is_compiled_with_its_headers_as_code_of_the_device(stand_in):
    assert compile_with_nvrtc(NAME, ARCH, "float32") == b"cubin"
    files, given = source_files(NAME), stand_in.given
    assert given["text"] == files.pop(f"{NAME}.cu")
    assert given["headers"] == {file.encode(): text.encode() for file, text in files.items()}
    assert {*NVRTC_OPTIONS, "-DELEMENT=float32", f"-arch={ARCH}"} <= {*given["options"]}
    assert not stand_in.programs


@pytest.mark.parametrize("stand_in", [True], indirect=True)
def test_what_the_compiler_says_is_told(stand_in):
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile norm.cu: norm.cu\(20\): error"):
        compile_with_nvrtc(NAME, ARCH, "float32")
    assert not stand_in.programs


def test_the_compiler_that_is_installed_compiles_our_kernels():
    pytest.importorskip("cupy_backends", reason="CuPy is not installed", exc_type=ImportError)
    try:
        libraries.load("nvrtc")
    except libraries.Unavailable as error:
        pytest.skip(str(error))
    assert compile_with_nvrtc(NAME, ARCH, "float32").startswith(b"\x7fELF")
