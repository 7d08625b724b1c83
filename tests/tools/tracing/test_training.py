"""Traces on the command line."""

import re

import pytest

from pydtnn.cli.parser import parse
from pydtnn.tools.tracing import load_timeline, read_traces
from pydtnn.train import main
from pydtnn.utils.observer import Kind
from tests.each import each
from tests.small_run import TINY, TRAIN

OPTIONS = [*TINY, "--epochs=1", "--tuning=fixed"]


@each(
    ("options", "problem"),
    [
        (["--trace-steps=1:2"], "train: --trace steps requires --trace"),
        (["--trace-kernels"], "train: --trace kernels requires --trace"),
    ],
)
def test_invalid_options_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        parse(options)


@each("text", ["10", "5:5", "a:b", "-1:5", "1:2:3"])
def test_steps_that_are_no_range_are_refused_before_training(text, tmp_path, capsys):
    assert main([*OPTIONS, f"--trace={tmp_path}/t:steps={text}", f"--output-dir={tmp_path}/r"]) == 1
    words = f"--trace steps must be a range of at least one step, such as 10:20, got '{text}'"
    assert words in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_run_writes_its_trace_and_says_so(tmp_path, capsys):
    run, trace = f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"
    assert main([*OPTIONS, run, trace, "--trace-kernels"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    (written,) = read_traces(tmp_path / "trace")
    assert last == (
        f"trace: {len(written.records):,} records of 1 rank in {tmp_path}/trace; see "
        f"python -m pydtnn trace summary {tmp_path}/trace"
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


def test_an_evaluation_can_be_traced(tmp_path):
    run, trace = f"--output-dir={tmp_path}/run", f"--trace={tmp_path}/trace"
    assert main([*OPTIONS, run, trace, "--trace-steps=0:2", "--quiet"]) == 0
    assert len(load_timeline(tmp_path / "trace").steps) == 2
    evaluate = [f"--resume={tmp_path}/run", "--evaluate-only", "--quiet"]
    assert main(evaluate) == 0  # is not traced if that is not asked for again
    assert main([*evaluate, f"{trace}-2"]) == 0
    (written,) = read_traces(tmp_path / "trace-2")
    phases = written.records[written.records["kind"] == Kind.PHASE]
    assert [written.names[name] for name in phases["name"]] == ["evaluation"]
    assert (written.records["kind"] == Kind.FORWARD).sum() > 0


def test_processes_write_one_trace(tmp_path, mpiexec):
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
