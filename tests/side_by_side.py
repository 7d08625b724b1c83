"""Run the tests in four processes at a time: ``python -m tests.side_by_side -m "not long"``.

Most tests use one core, and those that start ranks often wait. The output of the first process is
shown while it runs, that of the others at the end. Paths cannot be selected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

BYTECODE = Path(__file__).resolve().parents[1] / "build" / "bytecode"
"""Where compiled modules are kept: the tests start hundreds of processes, and compiling the modules
that each of them imports takes a second."""

OTHERS = (
    ("tests/comm", "tests/perfmodel", "tests/testing"),
    ("tests/layers", "tests/model", "tests/parallel", "tests/search", "tests/utils"),
    (
        *("tests/callbacks", "tests/cli", "tests/interchange", "tests/saving"),
        *("tests/simulated", "tests/test_packaging.py", "tests/tracing", "tests/training"),
    ),
)
"""Tests of the other processes: about a quarter of the time each."""


def main(arguments: Sequence[str]) -> int:
    """Run all processes with these arguments; return 0 if all succeed."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    environment = {"PYTHONPYCACHEPREFIX": str(BYTECODE), **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    rest = [f"--ignore={path}" for paths in OTHERS for path in paths]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in OTHERS]
        others = [
            subprocess.Popen([*pytest, *paths], stdout=output, stderr=output, env=environment)
            for paths, output in zip(OTHERS, outputs, strict=True)
        ]
        first = subprocess.Popen([*pytest, *rest], env=environment)
        codes = [process.wait() for process in (first, *others)]
        for output in outputs:
            output.seek(0)
            print(output.read(), end="")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
