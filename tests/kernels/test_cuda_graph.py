"""Capture and replay on the simulated device."""

import gc

import numpy as np
import pytest

from pydtnn.kernels.cuda.graph import WARM_UP, Graphs
from pydtnn.utils.device import Device
from tests.simulated import SimulatedCupy


@pytest.fixture(params=range(3))
def device(request):
    return Device(SimulatedCupy(seed=request.param))


def counted(x):
    """Work that adds 1 to an array, and how often it was called."""
    calls = []

    def work():
        calls.append(len(calls))
        x.__iadd__(1)
        return x

    return work, calls


def test_work_of_each_key_is_captured_once_between_what_the_callers_stream_does(device):
    graphs, x, y = Graphs(device), *(device.xp.asarray(np.zeros(2)) for _ in range(2))
    work, calls = counted(x)
    expected = 0
    for _ in range(WARM_UP + 4):
        x *= 2
        assert graphs.run("step", work) is x
        expected = 2 * expected + 1
        assert (x.get() == expected).all()
    graphs.run(1, counted(y)[0])
    assert (y.get() == 1).all()
    assert (x.get() == expected).all()
    assert len(calls) == WARM_UP + 1
    assert graphs.why_not == ""


def test_work_that_waits_for_the_device_goes_on_as_it_is_and_says_why(device):
    graphs, x = Graphs(device), device.xp.asarray(np.zeros(3))
    work, calls = counted(x)

    def impatient():
        work()
        return x.get()

    for run in range(WARM_UP + 3):
        assert (graphs.run("step", impatient) == run + 1).all()
    assert len(calls) == WARM_UP + 3 + 1  # once in vain
    assert graphs.why_not.startswith("test_cuda_graph.py:")
    assert graphs.why_not.endswith("operation not permitted when stream is capturing")


def test_nothing_is_collected_while_work_is_captured(device):
    """The end of a library's handle waits for the device, which would break the capture."""
    graphs, x = Graphs(device), device.xp.asarray(np.zeros(3))
    ended = []

    class Handle:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            ended.append(device.capturing)

    def work():
        for _ in range(4 * gc.get_threshold()[0]):
            Handle()
        x.__iadd__(1)

    for _ in range(WARM_UP + 2):
        graphs.run("step", work)
    assert ended
    assert not any(ended)
    assert gc.isenabled()
    assert graphs.why_not == ""


def test_a_stream_that_cannot_be_captured_runs_work_as_it_is(device, monkeypatch):
    def refuse(stream, mode=None):
        raise RuntimeError("not here")

    monkeypatch.setattr(type(device.current), "begin_capture", refuse)
    graphs, x = Graphs(device), device.xp.asarray(np.zeros(3))
    for run in range(WARM_UP + 2):
        assert (graphs.run("step", counted(x)[0]).get() == run + 1).all()
    assert graphs.why_not.endswith("not here")


def test_an_error_of_the_work_itself_is_raised_by_the_run_that_follows(device):
    graphs, runs = Graphs(device), []

    def work():
        runs.append(None)
        if len(runs) > WARM_UP:
            raise ValueError("no such layer")

    for _ in range(WARM_UP):
        graphs.run("step", work)
    with pytest.raises(ValueError, match="no such layer"):
        graphs.run("step", work)
