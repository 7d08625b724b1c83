"""Traces on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pydtnn.cli.parser import parse
from pydtnn.tracing import load_timeline, read_traces
from pydtnn.train import main
from pydtnn.utils.observer import Kind
from tests.each import each
from tests.launch import Finished
from tests.small_run import TINY, TRAIN, only_line

OPTIONS = [*TINY, "--epochs=1", "--tuning=fixed"]


@each(
    ("options", "problem"),
    [
        (["--trace-steps=1:2"], "train: --trace-steps requires --trace FOLDER"),
        (["--trace-kernels"], "train: --trace-kernels requires --trace FOLDER"),
        *(
            (
                ["--trace=folder", f"--trace-steps={text}"],
                "train: --trace-steps must be a range of at least one step, such as 10:20, got "
                f"'{text}'",
            )
            for text in ("10", "20:10", "5:5", "a:b", "-1:5", "1:2:3")
        ),
    ],
)
def test_invalid_options_are_refused(options: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        parse(options)


def test_limits_of_the_machine_are_the_best_of_those_before_and_after_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs ran beside the first product and beside the last copy."""
    before = {"flops_per_second": 1e9, "bytes_per_second": 8e9}
    found = iter([before, {"flops_per_second": 5e9, "bytes_per_second": 2e9}])
    monkeypatch.setattr("pydtnn.cli.run.measure_limits", lambda backend: next(found))
    assert main([*OPTIONS, f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"]) == 0
    (written,) = read_traces(tmp_path / "trace")
    machine = written.about["machine"]
    assert (machine["flops_per_second"], machine["bytes_per_second"]) == (5e9, 8e9)


def test_a_run_writes_its_trace_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trace = f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"
    assert main([*OPTIONS, run, trace, "--trace-kernels"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    (written,) = read_traces(tmp_path / "trace")
    assert last == (
        f"trace: {len(written.records):,} records of 1 rank in {tmp_path}/trace; see "
        f"python -m pydtnn.trace summary {tmp_path}/trace"
    )
    assert len(load_timeline(tmp_path / "trace").steps) == 8
    about = written.about
    assert about["layers"]["fc1"]["parameters"] == 144 * 512 + 512
    assert about["layers"]["fc1"]["forward_flops"] >= 2 * 16 * 144 * 512
    assert about["machine"]["flops_per_second"] > about["machine"]["bytes_per_second"] / 1e6 > 0
    kernels = written.records[written.records["kind"] == Kind.KERNEL]
    assert {"linear.forward", "update.sgd"} <= {written.names[name] for name in kernels["name"]}
    phases = written.records[written.records["kind"] == Kind.PHASE]
    assert (phases["memory"] >= 0).all()


def test_an_evaluation_can_be_traced(tmp_path: Path) -> None:
    run = f"--output-dir={tmp_path}/run"
    assert main([*OPTIONS, run, "--quiet"]) == 0
    trace = f"--trace={tmp_path}/trace"
    assert main([f"--resume={tmp_path}/run", "--evaluate-only", "--quiet", trace]) == 0
    (written,) = read_traces(tmp_path / "trace")
    phases = written.records[written.records["kind"] == Kind.PHASE]
    assert [written.names[name] for name in phases["name"]] == ["evaluation"]
    assert (written.records["kind"] == Kind.FORWARD).sum() > 0


def test_a_run_that_continues_is_traced_if_that_is_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trace = f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"
    assert main([*OPTIONS, run, trace, "--trace-steps=0:2", "--quiet"]) == 0
    assert main([f"--resume={tmp_path}/run", "--epochs=2", "--quiet"]) == 0
    assert main([f"--resume={tmp_path}/run", "--epochs=3", f"{trace}-2"]) == 0
    assert "changed: --epochs 2 -> 3\n" in capsys.readouterr().out
    steps = load_timeline(tmp_path / "trace-2").steps
    assert steps.epochs.tolist() == [2] * 8
    assert len(load_timeline(tmp_path / "trace").steps) == 2


def test_processes_write_one_trace(tmp_path: Path, mpiexec: Callable[..., Finished]) -> None:
    folders = [f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"]
    done = mpiexec(2, [*TRAIN, *OPTIONS, *folders, "--trace-steps=2:6", "--allreduce=ring"])
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert re.match(
        r"trace: [0-9,]+ records of 2 ranks in .*, clocks equal within [0-9.]+ us", line
    )
    timeline = load_timeline(tmp_path / "trace")
    assert timeline.steps.numbers.tolist() == [2, 3, 4, 5]
    assert len(timeline.messages) > 4 * 2
    assert not len(timeline.messages.unmatched_sent)
    for trace in read_traces(tmp_path / "trace"):
        calls = trace.records[trace.records["kind"] == Kind.CALL]
        assert trace.about["sent"] == calls["nbytes"].sum() > 0


def test_a_folder_that_cannot_be_used_is_refused_before_any_work(
    tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-0003.npz").touch()
    folders = [f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"]
    done = mpiexec(2, [*TRAIN, *OPTIONS, *folders])
    assert done.returncode != 0
    assert only_line(done.stderr) == (
        f"train: --trace: expected a folder without a trace, got {tmp_path}/trace with rank-0003.n"
        "pz; remove it, or choose another folder"
    )
    assert not (tmp_path / "run").exists()
