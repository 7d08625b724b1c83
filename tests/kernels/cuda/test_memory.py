"""Memory of a GPU: what is captured has a pool of its own, and scratch memory stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.cuda.memory import OUT_OF_MEMORY, DeviceMemory, Scratch
from tests.simulated.cupy import SimulatedCupy

MB = 1 << 20


@pytest.fixture
def xp() -> Any:
    return SimulatedCupy(eager=True)


def address(array: Any) -> int:
    return int(array.data.ptr)


def test_arrays_of_a_graph_lie_where_nobody_allocates_outside_of_it(xp):
    memory = DeviceMemory(xp)
    with memory.apart():
        captured = address(xp.empty((MB,), "uint8"))  # and given back
        assert address(memory.empty((MB,), "uint8")) == captured
    outside = {address(memory.empty((MB,), "uint8")) for _ in range(3)}
    assert captured not in outside
    with memory.apart():
        assert address(memory.zeros((MB,), "uint8")) == captured


def test_memory_of_graphs_is_not_trimmed(xp):
    memory = DeviceMemory(xp)
    with memory.apart():
        xp.empty((MB,), "uint8")
    xp.empty((2 * MB,), "uint8")
    assert memory.held == 3 * MB
    memory.trim()
    assert memory.held == memory.in_use == MB
    assert memory.peak_held == 3 * MB
    memory.reset_peak()
    assert memory.peak_held == MB


def test_what_waits_outside_is_given_up_before_a_graph_runs_out_of_memory(xp, monkeypatch):
    memory, make = DeviceMemory(xp), xp.cuda.Memory
    xp.empty((2 * MB,), "uint8")

    class CUDARuntimeError(RuntimeError):
        status = OUT_OF_MEMORY

    def limited(size: int) -> Any:
        if memory.held + size > 3 * MB:
            raise CUDARuntimeError
        return make(size)

    monkeypatch.setattr(xp.cuda, "Memory", limited)
    monkeypatch.setattr(xp.cuda.runtime, "CUDARuntimeError", CUDARuntimeError)
    with memory.apart():
        kept = xp.empty((2 * MB,), "uint8")
        assert memory.held == kept.nbytes
        with pytest.raises(CUDARuntimeError):
            xp.empty((2 * MB,), "uint8")
    monkeypatch.setattr(CUDARuntimeError, "status", OUT_OF_MEMORY + 1)
    xp.empty((MB // 2,), "uint8")
    with memory.apart(), pytest.raises(CUDARuntimeError):
        xp.empty((2 * MB,), "uint8")
    assert memory.held == kept.nbytes + MB // 2  # another error: nothing was given up


def test_scratch_memory_is_allocated_once_and_stays_for_graphs_that_know_it(xp):
    scratch = Scratch(xp)
    small = address(scratch.take(MB))
    assert address(scratch.take(MB)) == address(scratch.take(100)) == small
    large = scratch.take(2 * MB)
    assert large.nbytes == 2 * MB
    assert address(scratch.take(MB)) == address(large) != small
    others = {address(xp.empty((MB,), "uint8")) for _ in range(3)}
    assert small not in others
    assert scratch.nbytes == 3 * MB


def test_scratch_memory_of_candidates_is_not_kept(xp):
    scratch = Scratch(xp)
    with scratch.passing():
        assert scratch.take(MB).nbytes == MB
        assert scratch.nbytes == 0
    scratch.take(100)
    with scratch.passing():
        assert scratch.take(100).nbytes == 100
        assert scratch.take(MB).nbytes == MB
    assert scratch.nbytes == 100


def test_streams_have_scratch_memory_of_their_own(xp):
    scratch = Scratch(xp)
    here = address(scratch.take(MB))
    with xp.cuda.Stream(non_blocking=True):
        assert address(scratch.take(MB)) != here
    assert address(scratch.take(MB)) == here


def test_arrays_are_zeros_where_they_are_asked_to_be(xp):
    np.testing.assert_array_equal(xp.asnumpy(DeviceMemory(xp).zeros((3, 2), "float32")), 0)
