"""Ranks of Open MPI that are killed: the others continue, to the same bytes in exact mode."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch import ROOT, is_openmpi, why_not


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()) or not is_openmpi(), reason="needs Open MPI")
@pytest.mark.parametrize("mode", ["exact", "plain", "sharded", "compression", "local_sgd", "mesh"])
@pytest.mark.parametrize("together", [1, 2])
def test_a_run_survives_ranks_that_are_killed(mode: str, together: int) -> None:
    options = [f"--mode={mode}", f"--together={together}", "--kills=2", "--model=resnet8"]
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.survival", *options, "--longest=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert f"2 of 2 runs of {mode} ended as they should" in finished.stdout, finished
