"""Run the tests in five processes at a time: ``python -m tests.side_by_side -m "not long"``.

Most tests use one core, and those that start ranks often wait. The output of the first process is
shown while it runs, that of the others at the end. Paths cannot be selected.
"""

from __future__ import annotations

import os
import re
import shlex
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

MAX_REPORTED = 7
"""Failed tests whose commands are the last lines that are printed."""

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
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.NamedTemporaryFile("w")) for _ in (rest, *OTHERS)]
        shown = stack.enter_context(open(outputs[0].name))
        for paths, output in zip((rest, *OTHERS), outputs, strict=True):
            while sum(process.poll() is None for process in processes) >= AT_ONCE:
                time.sleep(0.1)
                print(shown.read(), end="", flush=True)
            command = [*pytest, *paths]
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            )
        while any(process.poll() is None for process in processes):
            time.sleep(0.1)
            print(shown.read(), end="", flush=True)
        codes = [process.wait() for process in processes]
        texts = [Path(output.name).read_text() for output in outputs]
        print(shown.read(), *texts[1:], sep="", end="")
    report("".join(texts))
    return next((code for code in codes if code not in (0, NO_TESTS)), min(codes))


def report(text: str) -> None:
    """Print the commands that repeat the tests that failed."""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", text, re.MULTILINE)
    python = os.path.relpath(sys.executable)
    for test in failed[:MAX_REPORTED]:
        print(f"failed: {python} -m pytest {shlex.quote(test)}")
    if len(failed) > MAX_REPORTED:
        print(f"failed: {len(failed) - MAX_REPORTED} other tests")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
