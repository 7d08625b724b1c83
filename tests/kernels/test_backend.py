"""Making a backend: names, threads, instruction sets, and what runs on the reference."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend, report
from pydtnn.kernels.cpu.isa import available

COLD = {f"update.{kernel}" for kernel in ("clip_factor", "rescale", "trust", "unscale", "watch")}
COLD |= {"norm.fold", "norm.constant_sums", "norm.moments", "norm.sums_length", "linear.take_rows"}
"""Kernels of a few numbers, a copy, or of models of float16, which are not meant for a CPU."""

COMBINED = {"fused.gate_norms", "norm.statistics_coefficients"}
"""Which call two others, that are compiled."""


def test_no_hot_kernel_of_the_cpu_backend_runs_on_the_reference(cpu_backend: Backend) -> None:
    reference = {kernel for kernel, runs_on in report(cpu_backend).items() if runs_on != "cpu"}
    assert reference == COLD | COMBINED


def test_report_names_every_kernel_of_the_reference_backend() -> None:
    kernels = report(create_backend("numpy"))
    assert set(kernels.values()) == {"reference"}
    assert {"conv.forward", "norm.statistics", "update.squared_norm"} <= set(kernels)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown backend 'numpi'; did you mean 'numpy'"):
        create_backend("numpi")


@pytest.mark.parametrize("threads", [0, -2])
def test_fewer_than_one_thread_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads must be at least 1, got {threads}"):
        create_backend("cpu", threads=threads)


def test_threads_are_what_the_caller_or_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert create_backend("cpu").threads == 3
    assert create_backend("cpu", threads=2).threads == 2
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_every_instruction_set_that_is_available_can_be_asked_for() -> None:
    assert available()[0] == "generic"
    for isa in available():
        assert create_backend("cpu", isa=isa).isa == isa


def test_the_widest_instruction_set_is_the_default_and_the_environment_lowers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYDTNN_ISA", raising=False)
    assert create_backend("cpu").isa == available()[-1]
    monkeypatch.setenv("PYDTNN_ISA", "generic")
    assert create_backend("cpu").isa == "generic"
    assert create_backend("cpu", isa=available()[-1]).isa == available()[-1]


def test_an_unknown_instruction_set_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"'sse9'.*generic"):
        create_backend("cpu", isa="sse9")
    monkeypatch.setenv("PYDTNN_ISA", "sse9")
    with pytest.raises(ValueError, match=r"PYDTNN_ISA.*'sse9'.*generic"):
        create_backend("cpu")


def test_two_backends_live_in_one_process() -> None:
    first, second = (
        create_backend("cpu", isa="generic", threads=1),
        create_backend("cpu", threads=2),
    )
    x = np.linspace(-1, 1, 50)
    results = []
    for backend in (first, second, first):
        out = backend.empty(x.shape, x.dtype)
        backend.elementwise.forward("relu", x, out=out)
        results.append(out)
    for out in results:
        np.testing.assert_array_equal(out, np.maximum(x, 0))


@pytest.mark.parametrize("name", ["cpu", "numpy"])
def test_arrays_go_to_the_backend_and_back_without_a_copy(name: str) -> None:
    backend = create_backend(name)
    x = np.arange(6.0)
    assert backend.asarray(x) is x
    assert backend.to_numpy(x) is x
    assert backend.asarray([1, 2], "float32").dtype == np.float32
    assert backend.asarray(x.reshape(2, 3).T).flags.c_contiguous
    assert not backend.zeros((2, 3), "float32").any()


def test_kernels_refuse_what_they_would_read_out_of_bounds(cpu_backend: Backend) -> None:
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
