"""The C sources: who includes whom, and that a header includes what it uses."""

from __future__ import annotations

import graphlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "pydtnn/kernels/cpu/src", ROOT / "pydtnn/comm/src")
SOURCES = {path.name: path for folder in FOLDERS for path in sorted(folder.glob("*.[ch]"))}
COMPILER = os.environ.get("CC", "cc")

VARIANT = {"VECTOR_BYTES": "16", "REAL_FLOAT": "1", "STORED_BF16": "0", "SUFFIX": "generic_f32"}
"""The macros that setup.py defines for a template, for every CPU."""


def included(path: Path) -> set[str]:
    """The files of ours that a file includes."""
    return set(re.findall(r'^#include "([\w.]+)"', path.read_text(), re.MULTILINE)) & {*SOURCES}


def test_no_circle_between_c_sources():
    try:
        graphlib.TopologicalSorter({n: included(path) for n, path in SOURCES.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.skipif(not shutil.which(COMPILER), reason="no C compiler")
def test_a_header_includes_what_it_uses():
    macros = [f"-D{key}={value}" for key, value in VARIANT.items()]
    flags = ["-std=gnu11", "-fsyntax-only", "-Wall", "-Wundef", "-Werror", "-Wno-unused"]
    command = [COMPILER, *flags, *macros, *(f"-I{folder}" for folder in FOLDERS), "-x", "c", "-"]
    for name in SOURCES:
        if name.endswith(".h"):
            text = f'#include "{name}"\n'
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


def test_a_source_includes_the_header_that_defines_what_it_tests():
    """A macro without its header would silently be 0 in a condition."""
    for name, path in SOURCES.items():
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for macro, header in (("HAS_DOTS", "stored.h"), ("HAS_AMX", "amx.h")):
            if re.search(rf"\b{macro}\b", code) and name != header:
                assert header in included(path), f"{name} tests {macro} without {header}"


@pytest.fixture(scope="module")
def setup_file() -> Any:
    """The module setup.py, which builds nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **options: None)
        patch.chdir(ROOT)
        spec = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def code_of(name: str) -> str:
    """A template without comments and names of files."""
    text = SOURCES[f"{name}.c"].read_text()
    return re.sub(r"/\*.*?\*/|#include[^\n]*", "", text, flags=re.DOTALL)


def test_variants_of_bfloat16_share_only_code_without_stored_elements(setup_file):
    for name in setup_file.WITHOUT_STORED:
        code = code_of(name)
        assert not re.search(r"\b(stored|STORED_BF16|[a-z]+_stored|sload|sstore)", code), name
        assert ("HAS_DOTS" in code) == (name in setup_file.OF_PAIRS), name


def test_variants_with_products_of_pairs_share_only_code_that_rounds_nothing(setup_file):
    for name in setup_file.WITHOUT_ROUNDING:
        assert not re.search(r"\b(HAS_DOTS|sround|sstore\w*|vput|vpair)\b", code_of(name)), name


def test_variants_of_amx_share_only_code_that_calls_nothing_of_their_own(setup_file):
    own = {
        function
        for path in SOURCES.values()
        if path.suffix == ".c" and setup_file.lender(str(path), "amx", "bf16")[0] == "amx"
        for function in setup_file.functions(str(path))
    }
    own |= {f"{function}_pairs" for function in own}  # templates that linear_pairs.c includes
    assert {"gemm_rows_pairs", "winograd_outer_pairs", "linear_forward_pairs"} <= own
    for name in setup_file.WITHOUT_PRODUCTS:
        assert not {"HAS_AMX", *own} & {*re.findall(r"\w+", code_of(name))}, name


def test_a_template_that_only_some_variants_have_is_empty_for_the_others(setup_file):
    for name in setup_file.ONLY:
        begun, _, ended = code_of(name).strip().partition("\n")
        assert re.match(r"#if |#define PAIRS", begun), name
        assert ended.endswith("#endif"), name


def test_what_a_selection_builds(setup_file, monkeypatch):
    """For a CPU with AVX512_BF16: which instruction sets have float64, and which there are."""
    build = setup_file.BuildKernels.__new__(setup_file.BuildKernels)
    build.plat_name = "linux-x86_64"
    monkeypatch.setattr(build, "_accepts", lambda flags: True)
    monkeypatch.setattr(build, "_widest", lambda known: ["avx512", "avx512_bf16"])

    def selected(words: str, real: str) -> set[str]:
        monkeypatch.setattr(setup_file, "SELECTED", words.split())
        return {isa for isa, one in build._selected() if one == real}

    every = {"generic", "avx2", "avx512", "avx512_bf16", "amx"}
    here = {"avx512", "avx512_bf16"}
    assert selected("all", "f32") == selected("all", "bf16") == every
    assert selected("all", "f64") == {"generic", "avx512"}
    assert selected("all amx_emulated", "bf16") == {*every, "amx_emulated"}
    assert selected("all avx2", "f64") == {"generic", "avx2", "avx512"}
    assert selected("all float64 bfloat16", "f64") == every
    assert selected("native", "f64") == selected("native", "bf16") == here
    assert selected("native float32", "f32") == {"avx512"}
    assert selected("native float32", "f64") == set()
    assert selected("avx2", "f64") == {"avx2"}
    assert selected("amx", "f32") == {*here, "amx"}
    assert selected("float32", "f32") == every
    build.plat_name = "linux-aarch64"
    monkeypatch.setattr(build, "_widest", lambda known: ["generic"])
    assert selected("all", "f64") == selected("native", "bf16") == {"generic"}
