"""Making a backend: names, threads, instruction sets, and what runs on the reference."""

import os

import numpy as np
import pytest

from pydtnn.kernels import create_backend, report
from pydtnn.utils.machine import MAX_THREADS, requested_threads
from tests.each import each

COLD = {f"update.{kernel}" for kernel in ("clip_factor", "rescale", "trust", "unscale", "watch")}
COLD |= {"norm.fold", "norm.constant_sums", "norm.moments", "norm.sums_length", "linear.take_rows"}
"""Kernels of a few numbers, a copy, or of models of float16, which are not meant for a CPU."""

COMBINED = {"fused.gate_norms", "norm.statistics_coefficients"}
"""Which call two others, that are compiled."""


def test_no_hot_kernel_of_the_cpu_backend_runs_on_the_reference(cpu_backend):
    reference = {kernel for kernel, runs_on in report(cpu_backend).items() if runs_on != "cpu"}
    assert reference == COLD | COMBINED


def test_an_unknown_name_and_fewer_than_one_thread_are_refused():
    with pytest.raises(ValueError, match="unknown backend 'numpi'; did you mean 'numpy'"):
        create_backend("numpi")
    for threads in (0, -2):
        with pytest.raises(ValueError, match=f"threads must be at least 1, got {threads}"):
            create_backend("cpu", threads=threads)


def test_threads_are_what_the_caller_or_the_environment_says(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert create_backend("cpu").threads == 3
    assert create_backend("cpu", threads=2).threads == 2
    assert os.environ["OMP_NUM_THREADS"] == "3"
    for text in ("1", f"{MAX_THREADS},2"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert requested_threads() == int(text.split(",")[0])
    for text in ("0", str(MAX_THREADS + 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        with pytest.raises(ValueError, match=f"expected a number from 1 to {MAX_THREADS}, got"):
            requested_threads()


@each("name", ["cpu", "numpy"])
def test_arrays_go_to_the_backend_and_back_without_a_copy(name):
    backend = create_backend(name)
    x = np.arange(6.0)
    assert backend.asarray(x) is x
    assert backend.to_numpy(x) is x
    assert backend.asarray([1, 2], "float32").dtype == np.float32
    assert backend.asarray(x.reshape(2, 3).T).flags.c_contiguous
    assert not backend.zeros((2, 3), "float32").any()


def test_kernels_refuse_what_they_would_read_out_of_bounds(cpu_backend):
    x, short = np.zeros((8, 4)), np.zeros(3)
    with pytest.raises(ValueError, match="needs 4 elements"):
        cpu_backend.norm.normalize(x, short, short, out=np.empty_like(x))
    with pytest.raises(ValueError, match="needs 9 elements"):
        cpu_backend.norm.statistics(x, out=np.empty(5))
    with pytest.raises(ValueError, match="needs 32 elements"):
        cpu_backend.elementwise.backward("relu", x, short, out=np.empty_like(x))
    frozen = np.empty_like(x)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cpu_backend.elementwise.forward("relu", x, out=frozen)
