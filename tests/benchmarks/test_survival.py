"""Ranks of Open MPI that are killed: the others continue, to the same bytes in exact mode."""

import subprocess
import sys

import pytest

from benchmarks.survival import MODES
from tests.each import each
from tests.launch import ROOT, is_openmpi, why_not


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()) or not is_openmpi(), reason="needs Open MPI")
@each("mode", MODES)
@each("kinds", ["one first", "two recovery"])
def test_a_run_survives_ranks_that_are_killed(mode, kinds):
    options = ["--modes", mode, "--kinds", *kinds.split(), "--kills=1"]
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.survival", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished
