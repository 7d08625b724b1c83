"""Every CUDA source compiles for the GPUs we promise, with nvcc and no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pydtnn.kernels.cuda.module import (
    compile_with_nvcc,
    cubin_name,
    find_cubin,
    find_nvcc,
    prebuild,
    source_files,
    source_names,
)

ARCHITECTURES = ("sm_80", "sm_90")

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")


@pytest.fixture(scope="module")
def cubins() -> Iterator[dict[tuple[str, str], Future[bytes]]]:
    """Machine code of all sources, all element types in one; compiled side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            (name, arch): pool.submit(compile_with_nvcc, name, arch, None)
            for name in source_names()
            for arch in ARCHITECTURES
        }


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", source_names())
def test_source_compiles(
    cubins: dict[tuple[str, str], Future[bytes]], name: str, arch: str
) -> None:
    cubin = cubins[name, arch].result()
    assert cubin.startswith(b"\x7fELF")


@needs_nvcc
def test_what_does_not_compile_is_told_in_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pydtnn.kernels.cuda.module.SOURCES", tmp_path)
    (tmp_path / "wrong.cu").write_text("int wrong = nothing;\n")
    with pytest.raises(RuntimeError, match=r"cannot compile wrong\.cu: [^$]*nothing"):
        compile_with_nvcc("wrong", "sm_90", None)


def test_sources_include_each_other_and_nothing_else() -> None:
    for name in source_names():
        for file, text in source_files(name).items():
            assert "#include <" not in text, f"{file} needs a header of CUDA or C++"


def test_machine_code_is_named_by_all_that_goes_into_it() -> None:
    names = {
        cubin_name(name, arch, element)
        for name in source_names()
        for arch in ARCHITECTURES
        for element in (None, "float32")
    }
    assert len(names) == 4 * len(source_names())


def test_a_source_is_compiled_once_and_then_read_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    compiled = []

    def compiler(name: str, arch: str, element: str | None) -> bytes:
        compiled.append(name)
        return b"machine code"

    for _ in range(2):
        assert find_cubin("random", "sm_90", "float32", compiler) == b"machine code"
    assert compiled == ["random"]


def test_prebuilt_machine_code_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prebuild(tmp_path, "sm_90", lambda name, arch, element: f"{name} {element}".encode())
    monkeypatch.setenv("PYDTNN_CUBINS", str(tmp_path))

    def compiler(name: str, arch: str, element: str | None) -> bytes:
        raise AssertionError("compiled again")

    assert find_cubin("norm", "sm_90", "bfloat16", compiler) == b"norm bfloat16"
