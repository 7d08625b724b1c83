"""Calls of kernels that are recorded to be repeated."""

import numpy as np

from pydtnn.kernels import create_backend
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
