"""The command line on virtual ranks."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.config import TrainConfig, flags
from pydtnn.cli.virtual import create_costs, describe_virtual_run
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.virtual.steps import time_steps
from pydtnn.tracing.records import RECORD, read_traces
from pydtnn.train import main
from tests.cli.test_auto import BASE, DECLARED, NEEDS, VALUES, WITH
from tests.each import each
from tests.launch import Finished
from tests.small_run import TINY, TRAIN, only_line

VIRTUAL = ["--virtual-ranks=4", "--platform=cpu-1gbit"]


def entries(folder: Path) -> list[dict]:
    return [*map(json.loads, (folder / "measurements.jsonl").read_text().splitlines())]


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "best.safetensors").read_bytes()).hexdigest()


@pytest.mark.long
def test_a_run_has_virtual_times_and_is_equal_in_every_repetition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "first", tmp_path / "second"]
    for folder in runs:
        assert main([*TINY, *VIRTUAL, f"--output-dir={folder}"]) == 0
    told = capsys.readouterr().out
    assert "4 ranks" in told
    assert "virtual time per step" in told
    assert "efficiency" in told
    histories = [json.loads((folder / "history.json").read_text()) for folder in runs]
    assert histories[0] == histories[1]
    times = [epoch["virtual_seconds"] for epoch in histories[0]]
    assert 0 < times[0] < times[1]
    assert weights(runs[0]) == weights(runs[1])
    seconds = [entry["ranks"][3]["total"] for entry in entries(runs[0])]
    assert sum(seconds) == pytest.approx(times[1], rel=0.3)
    assert seconds == [entry["ranks"][3]["total"] for entry in entries(runs[1])]


def test_a_trace_has_virtual_times(tmp_path: Path) -> None:
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
        ([*VIRTUAL, "--device=cuda"], "--virtual-ranks requires --device cpu or numpy"),
        ([*VIRTUAL, "--loader-threads=2"], "omit --loader-threads"),
        (["--timing-only"], "--timing-only requires --virtual-ranks N"),
        (["--virtual-ranks=0", "--platform=cpu-1gbit"], "--virtual-ranks must be at least 1"),
        (["--virtual-ranks=2", "--platform=cpu-2gbit"], "cpu-2gbit"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *options, "--quiet", f"--output-dir={tmp_path / 'run'}"]) != 0
    assert told in only_line(capsys.readouterr().err)


def test_more_ranks_than_samples_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--virtual-ranks=20", "--platform=cpu-1gbit", f"--output-dir={tmp_path / 'run'}"]
    assert main([*TINY, *options, "--quiet"]) != 0
    assert "at most one rank per sample" in only_line(capsys.readouterr().err)


def test_the_default_has_no_virtual_ranks() -> None:
    assert TrainConfig().virtual_ranks is None


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_training_has_the_bytes_of_mpi(
    ranks: int, tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    options = [*TINY, "--model=cnn", "--exact", "--quiet", "--loader-threads=0"]
    done = mpiexec(ranks, [*TRAIN, *options, f"--output-dir={tmp_path / 'mpi'}"])
    assert done.returncode == 0, done.stderr
    virtual = [f"--virtual-ranks={ranks}", "--platform=cpu-1gbit"]
    assert main([*options, *virtual, f"--output-dir={tmp_path / 'virtual'}"]) == 0
    assert weights(tmp_path / "virtual") == weights(tmp_path / "mpi")


def test_the_time_of_many_ranks_is_printed_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--virtual-ranks=256", "--platform=cpu-1gbit", "--timing-only", "--batch-size=4"]
    assert main([TINY[0], TINY[1], *options, f"--output-dir={tmp_path / 'run'}"]) == 0
    told = capsys.readouterr().out
    assert "256 on cpu-1gbit; only timed: one rank is executed, which stands for all" in told
    assert "cpu-1gbit has 32 hosts, 256 ranks need 256: further ones of the same kind" in told
    assert "1024 samples of all ranks" in told
    assert not (tmp_path / "run").exists()


def test_measured_times_are_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compute.json"
    options = [*TINY, *VIRTUAL, "--timing-only", f"--compute={file}"]
    assert main(options) == 0
    content = file.read_bytes()
    first = capsys.readouterr().out
    assert main(options) == 0
    assert file.read_bytes() == content
    assert capsys.readouterr().out == first
    assert (
        main(
            [
                *TINY,
                *VIRTUAL,
                "--quiet",
                "--epochs=1",
                *options[-1:],
                f"--output-dir={tmp_path / 'run'}",
            ]
        )
        == 0
    )
    assert file.read_bytes() == content


# -- every option of a run

SMALL = BASE | {"model": "mlp", "virtual_ranks": 4, "timing_only": True}

OUTSIDE = ("ema", "loader_threads", "compute", "disturb", "timing_only", "virtual_ranks", "dataset")
"""Options of what is not part of a step, of virtual ranks, and of data that determine shapes."""

EQUAL = ("formats", "pipeline_schedule", "plan", "recompute", "memory_limit")
"""Options of other workloads, which may take the same time: messages take longest here."""

NORMED = {"model": "resnet8"}
MORE: dict[str, dict[str, Any]] = WITH | dict.fromkeys(("sync_batch_norm", "fusion"), NORMED)

OTHERS = VALUES | {"model": "cnn", "threads": 2}


def timing(config: TrainConfig) -> float:
    platform = Platform.load(str(config.platform))
    costs = create_costs(config, platform)
    return time_steps(describe_virtual_run(config), platform, costs, steps=1).seconds


@functools.cache
def base_timing(name: str) -> float:
    return timing(TrainConfig(**SMALL | MORE.get(name, {})))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [n for n in flags(TrainConfig) if n not in {*DECLARED, *OUTSIDE}])
def test_an_option_changes_the_time_of_steps_or_is_refused(name: str) -> None:
    own, others = flags(TrainConfig)[name], SMALL | MORE.get(name, {})
    changed = others | {name: OTHERS.get(name, not own.default)}
    try:
        found, refused = timing(TrainConfig(**changed)), ""
    except ValueError as error:
        found, refused = 0.0, str(error)
    if refused:
        assert NEEDS.get(name, own.label) in refused
    elif name in EQUAL:
        one, other = (describe_virtual_run(TrainConfig(**options)) for options in (others, changed))
        assert one != other
    else:
        assert found != base_timing(name if name in MORE else "")


def test_what_is_beside_training_takes_no_virtual_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = []
    for name, often in (("never", "--checkpoint-epochs=0"), ("often", "--checkpoint-steps=2")):
        options = ["--scheme=local_sgd", often, f"--output-dir={tmp_path / name}"]
        assert main([*TINY, *VIRTUAL, *options]) == 0
        told = capsys.readouterr().out
        history = json.loads((tmp_path / name / "history.json").read_text())
        times.append([epoch["virtual_seconds"] for epoch in history])
        # the summary has the speed of the epochs
        in_epochs = [float(rate) for rate in re.findall(r"(\d+) samples/s  ", told)]
        (summary,) = re.findall(r"^samples/s +(\d+)$", told, re.M)
        assert float(summary) == pytest.approx(sum(in_epochs) / len(in_epochs), rel=0.05)
    # ranks that train alone begin together after a checkpoint, and wait less for each other
    assert times[0] == pytest.approx(times[1], rel=0.05)
    assert "virtual time beside it" in told
