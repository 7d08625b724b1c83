"""Calls of kernels that are recorded to be repeated."""

from dataclasses import replace

import numpy as np

from pydtnn.kernels import create_backend
from pydtnn.kernels.cpu.linear import CpuLinear
from pydtnn.kernels.recorded import Call, KernelRecorder


def test_a_compiled_kernel_is_recorded_where_it_is_given_the_same_arrays():
    backend, calls = create_backend("cpu", threads=1), list[Call]()
    x, w = np.random.default_rng(0).normal(size=(2, 5, 6))
    outs = [np.empty((5, 5)) for _ in range(2)]
    with KernelRecorder(backend, calls.append).recording():
        backend.linear.forward(x, w, None, out=outs[0])
        backend.linear.forward(np.asfortranarray(x), w, None, out=outs[1])  # is copied
    assert [kernel.__self__ is backend.linear for kernel, *_ in calls] == [False, True]
    w *= 2
    for kernel, args, options in calls:
        kernel(*args, **options)
    for out in outs:
        np.testing.assert_allclose(out, x @ w.T, rtol=1e-12)


class Doubled(CpuLinear):
    """Does more than to call a compiled kernel."""

    def forward(self, x, w, b, *, out):
        super().forward(x, w, b, out=out)
        out *= 2


def test_a_kernel_of_a_user_is_recorded_itself():
    backend, calls = create_backend("cpu", threads=1), list[Call]()
    backend = replace(backend, linear=Doubled(np, backend.isa, 1))
    x, w = np.random.default_rng(0).normal(size=(2, 5, 6))
    out = np.empty((5, 5))
    with KernelRecorder(backend, calls.append).recording():
        backend.linear.forward(x, w, None, out=out)
    out[...] = 0
    for kernel, args, options in calls:
        kernel(*args, **options)
    np.testing.assert_allclose(out, 2 * (x @ w.T), rtol=1e-12)
