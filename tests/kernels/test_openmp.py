"""How long threads of OpenMP's runtime wait for work before they sleep."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pydtnn.kernels.cpu._isa import has_openmp
from pydtnn.kernels.cpu.openmp import SPIN_VARIABLE, SPINS, WAIT_VARIABLES

CODE = """
import os
before = dict(os.environ)
import pydtnn.kernels.cpu
assert dict(os.environ) == before
os.system("echo inherited:$GOMP_SPINCOUNT >&2")
"""


def settings(**wishes: str) -> str:
    """What the runtime says of its environment when it is loaded."""
    own = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**own, "OMP_DISPLAY_ENV": "verbose", **wishes},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    if SPIN_VARIABLE not in done.stderr:
        pytest.skip("this OpenMP is not GCC's")
    return done.stderr


pytestmark = pytest.mark.skipif(not has_openmp(), reason="built without OpenMP")


def test_the_runtime_has_a_bounded_spin_unless_set_which_no_other_process_inherits():
    said = settings()
    assert f"{SPIN_VARIABLE} = '{SPINS}'" in said
    assert "inherited:\n" in said
    assert f"{SPIN_VARIABLE} = '77'" in settings(GOMP_SPINCOUNT="77")
    assert f"{SPIN_VARIABLE} = '{SPINS}'" not in settings(OMP_WAIT_POLICY="active")
