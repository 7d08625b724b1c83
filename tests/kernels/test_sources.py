"""The C sources: who includes whom, and that a header includes what it uses."""

from __future__ import annotations

import ast
import graphlib
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


def test_no_circle_between_c_sources() -> None:
    try:
        graphlib.TopologicalSorter({n: included(path) for n, path in SOURCES.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.skipif(not shutil.which(COMPILER), reason="no C compiler")
@pytest.mark.parametrize("name", [name for name in SOURCES if name.endswith(".h")])
def test_a_header_includes_what_it_uses(name: str) -> None:
    macros = [f"-D{key}={value}" for key, value in VARIANT.items()]
    flags = ["-std=gnu11", "-fsyntax-only", "-Wall", "-Wundef", "-Werror", "-Wno-unused"]
    folders = [f"-I{folder}" for folder in FOLDERS]
    command = [COMPILER, *flags, *macros, *folders, "-x", "c", "-"]
    done = subprocess.run(
        command, input=f'#include "{name}"\n', capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_includes_the_header_that_defines_what_it_tests(name: str) -> None:
    """A macro without its header would silently be 0 in a condition."""
    code = re.sub(r"/\*.*?\*/", "", SOURCES[name].read_text(), flags=re.DOTALL)
    for macro, header in (("HAS_DOTS", "stored.h"), ("HAS_AMX", "amx.h")):
        if re.search(rf"\b{macro}\b", code) and name != header:
            assert header in included(SOURCES[name]), f"{name} tests {macro} without {header}"


def setting(name: str) -> Any:
    """The value of a literal that setup.py assigns to a name."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


@pytest.mark.parametrize("name", setting("WITHOUT_STORED"))
def test_variants_of_bfloat16_share_only_code_without_stored_elements(name: str) -> None:
    text = SOURCES[f"{name}.c"].read_text()
    code = re.sub(r"/\*.*?\*/|#include[^\n]*", "", text, flags=re.DOTALL)
    assert {*setting("WITHOUT_STORED")[name]} <= {*re.findall(r"\w+", code)}
    assert not re.search(r"\b(stored|STORED_BF16|[a-z]+_stored|sload|sstore)", code)
    assert ("HAS_DOTS" in code) == (name in setting("OF_PAIRS"))
