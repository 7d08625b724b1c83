"""Every CUDA source compiles for the GPUs we promise, with nvcc and no GPU, to what was meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pydtnn.kernels.cuda.module import (
    compile_with_nvcc,
    cubin_name,
    elements,
    find_cubin,
    find_nvcc,
    prebuild,
    source_files,
    source_names,
)
from tests.kernels.cuda.compiled import Kernel, compiled

ARCHITECTURES = ("sm_80", "sm_90")
CASES = [pytest.param("sm_80", marks=pytest.mark.matrix), "sm_90"]
"""A source takes up to a minute for each."""

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")

# Kernels that only wait for memory, by source: the loads and stores of 16 bytes that a thread has
# under way at once, at least; a kernel with sums stores none.
HOT = {
    "convert": {(2, 2): ("convert_float32", "convert_bfloat16", "convert_float16")},
    "elementwise": {
        (2, 2): ("relu_forward", "gelu_forward"),
        (4, 2): ("relu_backward", "silu_backward", "add"),
        (8, 8): ("softmax_forward_warp",),
        (8, 4): ("softmax_backward_warp",),
    },
    "fused": {
        (4, 4): ("evaluate_1",),
        (4, 2): ("evaluate_2", "gate_1", "gate_sums_1"),
        (6, 2): ("gate_2",),
        (3, 1): ("gate_sums_2",),
    },
    "linear": {(4, 4): ("add_bias",), (4, 0): ("backward_bias",)},
    "loss": {
        (8, 8): ("cross_entropy_warp",),
        (4, 2): ("binary_cross_entropy", "squared_error", "absolute_error"),
    },
    "norm": {
        (4, 0): ("statistics", "backward_statistics", "group_parameters"),
        (4, 4): ("normalize",),
        (4, 2): ("backward_normalize",),
        (8, 8): ("group_forward_warp", "group_forward_block"),
        (8, 4): ("group_backward_warp", "group_backward_block"),
    },
    "pool": {
        (3, 1): ("max_forward_uint8", "average_forward", "average_backward", "adaptive_forward")
        + ("adaptive_backward",),
        (1, 1): ("max_backward_uint8",),
    },
    "random": {(2, 2): ("dropout",)},
    "update": {
        (3, 2): ("sgd", "rmsprop"),
        (4, 3): ("adam", "nadam"),
        (2, 2): ("scale", "unscale"),
        (4, 0): ("squared_norm",),
    },
}

WHOLE = ("evaluate", "gate_1", "gate_2", "normalize", "backward_normalize", "add_bias", "softmax")
"""Beginnings of names of kernels that store vectors and nothing else."""


@pytest.fixture(scope="module")
def kernels(
    pytestconfig: pytest.Config,
) -> Iterator[dict[tuple[str, str], Future[dict[str, Kernel]]]]:
    """What became of all sources, all element types in one; compiled side by side, and once."""
    archs = ARCHITECTURES if pytestconfig.getoption("--matrix") else ARCHITECTURES[-1:]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            (name, arch): pool.submit(compiled, name, arch)
            for name in sorted(source_names(), key=lambda name: name not in ("loss", "norm"))
            for arch in archs
        }


@needs_nvcc
@pytest.mark.parametrize("arch", CASES)
@pytest.mark.parametrize("name", source_names())
def test_source_compiles_without_a_warning(kernels, name, arch):
    made = kernels[name, arch].result()
    for element in elements(name):
        assert any(kernel.endswith(f"_{element}") for kernel in made)


def hot(name: str) -> list[tuple[str, str, int, int]]:
    """Kernels that must be fast: their names, the variants that move vectors, loads and stores."""
    return [
        (kernel, f"{kernel}_wide_{element}", *accesses)
        for accesses, kernels in HOT[name].items()
        for kernel in kernels
        for element in elements(name)
        if element != "float64"
    ]


@needs_nvcc
@pytest.mark.parametrize("arch", CASES)
@pytest.mark.parametrize("name", HOT)
def test_fast_kernels_move_16_bytes_at_a_time_and_keep_their_registers(kernels, name, arch):
    made = kernels[name, arch].result()
    for short, full, loads, stores in hot(name):
        kernel = made[full]
        if short.startswith(WHOLE):
            assert set(kernel.stores) == {16}, f"{full} stores {kernel.stores}"
        assert kernel.spilled == 0, f"{full} spills {kernel.spilled} bytes"
        assert kernel.loads.count(16) >= loads, f"{full} loads {kernel.loads}"
        assert kernel.stores.count(16) >= stores, f"{full} stores {kernel.stores}"


@needs_nvcc
def test_what_does_not_compile_is_told_in_the_compilers_words(monkeypatch, tmp_path):
    monkeypatch.setattr("pydtnn.kernels.cuda.module.SOURCES", tmp_path)
    (tmp_path / "wrong.cu").write_text("int wrong = nothing;\n")
    with pytest.raises(RuntimeError, match=r"cannot compile wrong\.cu: [^$]*nothing"):
        compile_with_nvcc("wrong", "sm_90", None)


def test_sources_include_each_other_and_nothing_else():
    for name in source_names():
        for file, text in source_files(name).items():
            assert "#include <" not in text, f"{file} needs a header of CUDA or C++"


def test_machine_code_is_named_by_all_that_goes_into_it():
    names = {
        cubin_name(name, arch, element)
        for name in source_names()
        for arch in ARCHITECTURES
        for element in (None, "float32")
    }
    assert len(names) == 4 * len(source_names())


def test_a_source_is_compiled_once_unless_its_machine_code_was_prebuilt(monkeypatch, tmp_path):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "cache"))
    compiled = []

    def compiler(name: str, arch: str, element: str | None) -> bytes:
        compiled.append(name)
        return f"{name} {element}".encode()

    for _ in range(2):
        assert find_cubin("random", "sm_90", "float32", compiler) == b"random float32"
    assert compiled == ["random"]
    prebuild(tmp_path, "sm_90", compiler)
    compiled.clear()
    monkeypatch.setenv("PYDTNN_CUBINS", str(tmp_path))
    assert find_cubin("norm", "sm_90", "bfloat16", compiler) == b"norm bfloat16"
    assert not compiled
