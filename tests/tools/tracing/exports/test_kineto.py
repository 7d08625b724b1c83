"""Traces in the form of PyTorch's profiler: their structure, and what HTA computes from them."""

import json
import re
from itertools import pairwise

import pytest

from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis import usage
from pydtnn.tools.tracing.exports import FORMATS
from tests.tools.tracing.synthetic import MS, write_run

COMMUNICATION = re.compile(r"^nccl.*Kernel")
"""Names of kernels that tools take to be communication."""


@pytest.fixture(scope="module", params=["messages", "library"])
def run(tmp_path_factory, request):
    """A timeline, and the folder of its export."""
    folder = tmp_path_factory.mktemp("kineto")
    write_run(
        folder / "run",
        steps=6,
        noise=0.2,
        slower=lambda rank, *where: 4 * MS * ((rank, where[-1]) == (2, "conv1 backward")),
        messages=request.param == "messages",
        whole=request.param == "messages",
    )
    timeline = load_timeline(folder / "run")
    FORMATS["kineto"].write(timeline, folder / "kineto")
    return timeline, folder / "kineto"


def kernels_of(folder, rank):
    text = (folder / f"rank-{rank:04}.json").read_text()
    assert re.search(r'"rank":\s+(\d+)', text.splitlines()[0])[1] == str(rank)
    content = json.loads(text)
    assert content["distributedInfo"]["world_size"] == 4
    events = content["traceEvents"]
    return events, [event for event in events if event.get("cat") == "kernel"]


def test_each_kernel_is_launched_within_a_step_and_none_overlaps_on_a_stream(run):
    timeline, folder = run
    for rank in range(timeline.size):
        events, kernels = kernels_of(folder, rank)
        steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
        assert [step["name"] for step in steps] == [f"ProfilerStep#{i}" for i in range(6)]
        launches = {
            event["args"]["correlation"]: event
            for event in events
            if event.get("cat") == "cuda_runtime"
        }
        assert len(launches) == len(kernels) > 100
        for kernel in kernels:
            launch = launches.pop(kernel["args"]["correlation"])
            assert launch["ts"] == kernel["ts"]
            assert any(one["ts"] <= launch["ts"] < one["ts"] + one["dur"] for one in steps)
        for stream in {kernel["args"]["stream"] for kernel in kernels}:
            own = [kernel for kernel in kernels if kernel["args"]["stream"] == stream]
            own.sort(key=lambda kernel: kernel["ts"])
            assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))
            assert len({bool(COMMUNICATION.match(kernel["name"])) for kernel in own}) == 1


def test_kernels_have_the_times_of_the_analysis(run):
    timeline, folder = run
    for rank, used in enumerate(usage(timeline)):
        _, kernels = kernels_of(folder, rank)
        names = {kernel["name"] for kernel in kernels}
        assert "data" in names
        assert "step" not in names  # of time without an activity
        compute, communication = set(), set()
        for kernel in kernels:
            where = communication if COMMUNICATION.match(kernel["name"]) else compute
            where.update(range(kernel["ts"], kernel["ts"] + kernel["dur"]))
        assert len(compute) == pytest.approx(1e6 * used.compute, rel=1e-3)
        assert len(communication - compute) == pytest.approx(1e6 * used.communication, rel=1e-2)
        assert len(communication & compute) == pytest.approx(1e6 * used.overlapped, rel=1e-3)


def test_a_trace_without_steps_is_refused(tmp_path):
    write_run(tmp_path / "run", steps=0)
    with pytest.raises(ValueError, match="expected training steps that all ranks have recorded"):
        FORMATS["kineto"].write(load_timeline(tmp_path / "run"), tmp_path / "kineto")
    assert not (tmp_path / "kineto").exists()
