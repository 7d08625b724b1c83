"""Run the tests in two pytest processes at a time: ``python -m tests.side_by_side -m "not long"``.

Most tests use one core, and those that start ranks often wait. The output of the first process is
shown while it runs, that of the second one at the end. Paths cannot be selected.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

SECOND = ("tests/comm", "tests/parallel", "tests/cli", "tests/simulated", "tests/training")
"""Tests of the second process: about half of the time, with and without the long ones."""


def main(arguments: Sequence[str]) -> int:
    """Run both processes with these arguments; return 0 if both succeed."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    others = [f"--ignore={path}" for path in SECOND]
    with tempfile.TemporaryFile("w+") as output:
        second = subprocess.Popen([*pytest, *SECOND], stdout=output, stderr=output)
        first = subprocess.Popen([*pytest, *others])
        codes = [process.wait() for process in (first, second)]
        output.seek(0)
        print(output.read(), end="")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
