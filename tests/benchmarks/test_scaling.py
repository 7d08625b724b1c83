"""Scaling runs: intervals are Student's, rows and pictures are made, the job file runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch
from tests.each import each

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "docs" / "slurm-resnet44.sh"
SMALL = ("--model", "mlp", "--ours", "--ranks", "1", "2", "--runs", "1", "--epochs", "1")


@each(("freedom", "expected"), [(1, 12.706), (11, 2.201)])
def test_students_t_is_that_of_the_tables(freedom, expected):
    from benchmarks.comm.intervals import student_t

    assert student_t(freedom) == pytest.approx(expected, abs=1e-3)


def test_speed_ups_are_taken_within_a_round():
    from benchmarks.comm.ranks import Run
    from benchmarks.comm.scaling import Case, summarise

    rounds = {1: (100.0, 10.0), 2: (190.0, 19.0)}  # the second ten times as slow for all
    found = {
        Case("weak", "ours", n): [Run([rate], [0.1], 2.6, 100.0) for rate in rates]
        for n, rates in rounds.items()
    }
    row = summarise(found)[Case("weak", "ours", 2)]
    assert row.speedup == pytest.approx((1.9, 1.9, 1.9))
    assert row.rate.low < row.rate.mean < row.rate.high


def needs_ranks():
    if reason := launch.why_not():
        pytest.skip(reason)


def test_scaling_prints_every_case():
    needs_ranks()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.comm.scaling", *SMALL, "--kinds", "strong"],
        env={**(launch.OPENMPI if launch.is_openmpi() else {}), **os.environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("strong")]
    assert [row[2].rstrip("*") for row in rows] == ["1", "2"]
    assert all(float(row[3]) > 0 for row in rows)
    assert "10.11 times on 12 GPUs" in done.stdout


def test_the_job_file_runs_under_a_stand_in_for_slurm(tmp_path):
    needs_ranks()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the extra `plot`")
    (tmp_path / "srun").write_text(
        "#!/bin/bash\n"
        f"echo $* >> {tmp_path}/calls\n"
        "while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && n=${1#*=}; shift; done\n"
        f'exec {launch.mpiexec()} -n $n "$@"\n'
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    for program in ("srun", "scontrol"):
        (tmp_path / program).chmod(0o755)
    picture = tmp_path / "scaling.png"
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "VENV": str(Path(sys.executable).parent.parent),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    files = ("--output", str(tmp_path / "scaling.txt"), "--picture", str(picture))
    done = subprocess.run(
        ["bash", str(JOB), *SMALL, "--kinds", "weak", *files],
        env={**(launch.OPENMPI if launch.is_openmpi() else {}), **os.environ, **slurm},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "scaling.txt").read_text().splitlines()) == 7
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("--nodes=2 --ntasks=2" in call for call in calls) == 1
