"""Run the tests in five processes at a time: ``python -m tests.side_by_side -m "not long"``.

Most tests use one core, and those that start ranks often wait. The output of the first process is
shown while it runs, that of the others at the end. Paths cannot be selected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

BYTECODE = Path(__file__).resolve().parents[1] / "build" / "bytecode"
"""Where compiled modules are kept: the tests start hundreds of processes, and compiling the modules
that each of them imports takes a second."""

AT_ONCE = 5

NO_TESTS = 5
"""Exit status of pytest that has collected no tests."""

OTHERS = (
    ("tests/comm", "tests/parallel"),
    ("tests/perfmodel",),
    ("tests/tracing", "tests/training", "tests/test_models_in_training.py"),
    ("tests/benchmarks", "tests/fuzz", "tests/parity"),
    ("tests/model",),
    ("tests/layers", "tests/saving", "tests/search", "tests/simulated", "tests/testing"),
    ("tests/callbacks", "tests/interchange", "tests/report", "tests/test_packaging.py"),
    ("tests/data", "tests/kernels", "tests/runs", "tests/utils"),
    ("tests/cli",),
)
"""Tests of the other processes, each of which starts when one has ended: the longest first, so that
the last ones end together. Tests on MPI ranks are in three of them: the ranks of each process
import all of its files again."""


def main(arguments: Sequence[str]) -> int:
    """Run all processes with these arguments; return 0 if all succeed.

    A process may have no tests, as where all of its files are left out.
    """
    pytest = [sys.executable, "-m", "pytest", *arguments]
    environment = {"PYTHONPYCACHEPREFIX": str(BYTECODE), **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    rest = [f"--ignore={path}" for paths in OTHERS for path in paths]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in OTHERS]
        processes = [subprocess.Popen([*pytest, *rest], env=environment)]
        for paths, output in zip(OTHERS, outputs, strict=True):
            while sum(process.poll() is None for process in processes) >= AT_ONCE:
                time.sleep(0.1)
            command = [*pytest, *paths]
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            )
        codes = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
            print(output.read(), end="")
    return next((code for code in codes if code not in (0, NO_TESTS)), min(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
