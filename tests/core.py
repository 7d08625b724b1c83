"""Run the fast tests of a copy of the checkout without `pydtnn.tools` and the code for GPUs.

    python -m tests.core [ARGUMENT OF PYTEST ...]

Tests that import what is deleted, and those marked `needs`, are left out (`absent`).
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DELETED = (
    "pydtnn.tools",
    "pydtnn.kernels.cuda",
    "pydtnn.comm.nccl",
    "pydtnn.comm.staged",
    "pydtnn.training.capture",
)
"""Modules without which the library trains on CPUs."""

ALONE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
"""
"""Lets Python find no module in the checkout."""


def _paths(module: str) -> tuple[Path, Path]:
    path = ROOT / module.replace(".", "/")
    return path, path.with_suffix(".py")


DEFINITIONS = (ast.FunctionDef, ast.ClassDef)

MISSING = tuple(name for name in DELETED if not any(path.exists() for path in _paths(name)))
"""Those that this checkout, a copy, does not have."""


def copy_core(folder: Path) -> dict[str, str]:
    """Copy the library without `DELETED`; return the environment of processes that find it only."""
    deleted = {path for name in DELETED for path in _paths(name)}

    def ignored(where: str, names: list[str]) -> set[str]:
        return {name for name in names if name == "__pycache__" or Path(where, name) in deleted}

    for name in ("pydtnn", "models"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, copy_function=_copy)
    (folder / "pydtnn" / "models").symlink_to(folder / "models")
    (folder / "sitecustomize.py").write_text(ALONE)
    return {**os.environ, "PYTHONPATH": str(folder)}


def _copy(file: str, to: str) -> None:
    (os.link if file.endswith(".so") else shutil.copy2)(file, to)


def absent(path: Path) -> set[str]:
    """Return the deleted modules that a test file imports, or a file of tests that it imports."""
    found: set[str] = set()
    files, seen = [path], {ROOT / "tests" / "conftest.py"}
    while files:
        file = files.pop()
        if file in seen or not file.exists():
            continue
        seen.add(file)
        for name in imported(file):
            if name.startswith("tests."):
                folder, module = _paths(name)
                files += [module, folder / "__init__.py"]
            elif f"{name}.".startswith(tuple(f"{missing}." for missing in MISSING)):
                found.add(name)
    return found


@cache
def imported(file: Path) -> list[str]:
    """Return the modules, and names in modules, that a file imports."""
    body = ast.parse(file.read_text()).body
    nodes = [n for part in body if not isinstance(part, DEFINITIONS) for n in ast.walk(part)]
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy the checkout to build/core, and run its fast tests."""
    folder = ROOT / "build" / "core"
    shutil.rmtree(folder, ignore_errors=True)
    environment = copy_core(folder)
    for path in ROOT.iterdir():
        name = path.name
        if path.is_dir() and not name.startswith((".", "build")) and not (folder / name).exists():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy2(path, folder / name)
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", "tests.side_by_side", "-m", "not long and not measure", *given]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
