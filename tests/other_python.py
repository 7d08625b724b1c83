"""Libraries of other projects, which need not be installed beside pydtnn."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

VARIABLE = "PYDTNN_TEST_PYTHON"
"""Names Python interpreters that have such libraries, separated by colons."""


def run_with(library: str, program: str, *arguments: object) -> object:
    """Run a program by an interpreter that has a library; return what it prints, from JSON.

    Skip the test if this interpreter does not have the library, nor one of `VARIABLE`.
    """
    found = [sys.executable] if importlib.util.find_spec(library) else []
    for python in os.environ.get(VARIABLE, "").split(":"):
        if python and not found:
            test = subprocess.run([python, "-c", f"import {library}"], capture_output=True)
            found += [python] * (test.returncode == 0)
    if not found:
        pytest.skip(f"{library} is not installed; name an interpreter that has it in {VARIABLE}")
    done = subprocess.run(
        [found[0], "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MPLBACKEND": "agg"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
