"""The benchmarks that time PyTorch run, on little work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

ROOT = Path(__file__).resolve().parents[2]


def words(script: str, *options: str) -> list[str]:
    """What the last line that a benchmark prints consists of."""
    command = [sys.executable, *script.split(), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16")])
def test_step_time_compares_steps_and_memory(options):
    found = words("benchmarks/step_time.py", "--models", "mlp", "--turns", "2", *options)
    assert found[0] == "mlp"
    assert min(map(float, found[4:7])) > 0


def test_kernels_compares_algorithms_with_onednn():
    options = ("--families", "linear", "--only", "512-10", "--repeats", "2")
    ours, _, none, no, onednn, _, ratio, *_ = words("-m benchmarks.cpu.kernels", *options)[6:]
    assert (none, no) == ("-", "-")
    assert min(map(float, (ours, onednn, ratio.removesuffix("x")))) > 0


def test_ddp_compares_data_parallel_training():
    if not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")):
        pytest.skip("there is no mpirun here")
    options = ("--models", "mlp", "--ranks", "2", "--epochs", "2", "--runs", "1")
    model, ranks, _, _, ours, theirs, ratio, *_ = words("-m benchmarks.comm.ddp", *options)
    assert (model, ranks) == ("mlp", "2")
    assert min(map(float, (ours, theirs, ratio))) > 0
