"""The command line on virtual ranks."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.tracing.records import RECORD, read_traces
from pydtnn.train import main
from pydtnn.training.workload import Workload
from tests.each import each
from tests.small_run import TINY, TRAIN, only_line

VIRTUAL = ["--virtual-ranks=4", "--platform=cpu-1gbit"]


def entries(folder: Path) -> list[dict]:
    return [*map(json.loads, (folder / "measurements.jsonl").read_text().splitlines())]


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "best.safetensors").read_bytes()).hexdigest()


def test_a_trace_has_virtual_times(tmp_path):
    options = [f"--trace={tmp_path / 'trace'}", "--quiet", f"--output-dir={tmp_path / 'run'}"]
    assert main([*TINY, *VIRTUAL, "--epochs=1", *options]) == 0
    ranks = read_traces(tmp_path / "trace")
    assert len(ranks) == 4
    (entry,) = entries(tmp_path / "run")
    for rank, trace in enumerate(ranks):
        assert trace.records.dtype == RECORD
        steps = trace.records[trace.records["name"] == trace.names.index("step")]
        seconds = entry["ranks"][rank]["steps"]
        assert steps["duration"].sum() * 1e-9 == pytest.approx(seconds, rel=1e-3)


@each(
    ("options", "told"),
    [
        (["--virtual-ranks=2"], "--virtual-ranks requires --platform"),
        ([*VIRTUAL, "--device=cuda"], "--device cuda; use --device cpu or numpy"),
        ([*VIRTUAL, "--loader-threads=2"], "--loader-threads 2; omit it, as batches"),
        (["--timing-only"], "--timing-only has been removed: python -m pydtnn oracle predicts"),
        (["--virtual-ranks=4:timing_only=true"], "timing_only has been removed: python -m pydtnn"),
        (["--compute=times.yaml"], "--compute has been removed: --platform names a platform"),
        (["--virtual-ranks=0", "--platform=cpu-1gbit"], "--virtual-ranks must be at least 1"),
        (["--virtual-ranks=2", "--platform=cpu-2gbit"], "cpu-2gbit"),
        (["--virtual-ranks=20", "--platform=cpu-1gbit"], "at most one rank per sample"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, told, tmp_path, capsys):
    assert main([*TINY, *options, "--quiet", f"--output-dir={tmp_path / 'run'}"]) != 0
    assert told in only_line(capsys.readouterr().err)


@each(
    ("options", "parts"), [([], 1), (["--parallel=data=4"], 4), (["--parallel=data=2,shard=2"], 2)]
)
def test_a_rank_updates_its_part_of_the_state(options, parts, tmp_path, capsys, monkeypatch):
    def stop(work: Workload, platform: Platform) -> None:
        raise ValueError(f"{work.parts} of {work.slots}")

    monkeypatch.setattr(AnalyticCosts, "of", stop)
    scheme = ["--scheme=sharded"] if options else []
    assert main([*TINY, *VIRTUAL, *options, *scheme, f"--output-dir={tmp_path / 'run'}"]) != 0
    assert only_line(capsys.readouterr().err).endswith(f"{parts} of 1")


@pytest.mark.long
def test_exact_training_has_the_bytes_of_mpi(tmp_path, mpiexec):
    options = [*TINY, "--model=cnn", "--exact", "--quiet", "--loader-threads=0"]
    done = mpiexec(2, [*TRAIN, *options, f"--output-dir={tmp_path / 'mpi'}"])
    assert done.returncode == 0, done.stderr
    virtual = ["--virtual-ranks=2", "--platform=cpu-1gbit"]
    assert main([*options, *virtual, f"--output-dir={tmp_path / 'virtual'}"]) == 0
    assert weights(tmp_path / "virtual") == weights(tmp_path / "mpi")


def test_what_is_beside_training_takes_no_virtual_time(tmp_path, capsys):
    times = []
    for name, often in (("never", "--checkpoint-epochs=0"), ("often", "--checkpoint-steps=2")):
        options = ["--epochs=1", "--steps-per-epoch=4", often, f"--output-dir={tmp_path / name}"]
        assert main([*TINY, *VIRTUAL, *options]) == 0
        told = capsys.readouterr().out
        assert "4 ranks" in told
        (epoch,) = json.loads((tmp_path / name / "history.json").read_text())
        times.append(epoch["virtual_seconds"])
        # the summary has the speed of the epoch
        (in_epoch,) = re.findall(r"(\d+) samples/s  ", told)
        (summary,) = re.findall(r"^samples/s +(\d+)$", told, re.M)
        assert float(summary) == pytest.approx(float(in_epoch), rel=0.05)
    # ranks begin together after a checkpoint, and wait less for each other
    assert times[0] == pytest.approx(times[1], rel=0.05)
    assert "virtual time beside it" in told
