"""Parameters in flat arrays, cut into buckets."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, ReLU, Sequential, StepContext
from pydtnn.layers.parameters import ALIGNMENT, Parameter, ParameterBuffer
from pydtnn.model import Model
from tests.each import each


def zeros(shape: tuple[int, ...], *_: object) -> np.ndarray:
    return np.zeros(shape)


def make(
    sizes: list[int], *bucket_bytes: int, dtype: str = "float32"
) -> tuple[list[Parameter], ParameterBuffer]:
    """Parameters p0, p1... of these sizes, completed by nodes n, n - 1..."""
    parameters = [Parameter(f"p{i}", (size,), zeros) for i, size in enumerate(sizes)]
    ready = [(p, len(sizes) - i) for i, p in enumerate(parameters)]
    backend = create_backend("numpy")
    return parameters, ParameterBuffer(
        ready, backend=backend, dtype=dtype, bucket_bytes=bucket_bytes
    )


def offset(buffer: ParameterBuffer, p: Parameter) -> int:
    """Bytes from the start of the flat array."""
    return int(p.value.ctypes.data - buffer.values.ctypes.data)


@each("dtype", ["float32", "float64"])
def test_every_parameter_starts_on_a_cache_line(dtype):
    parameters, buffer = make([1, 16, 17, 3, 100], 1 << 20, dtype)
    assert [offset(buffer, p) % ALIGNMENT for p in parameters] == [0] * 5
    assert offset(buffer, parameters[1]) == ALIGNMENT
    assert (buffer.size * buffer.dtype.itemsize) % ALIGNMENT == 0


@each(
    ("sizes", "lengths", "counts", "ready"),
    [  # 16 float32 are one line of 64 bytes
        ([16] * 7, [3 * 64], [3, 3, 1], [5, 2, 1]),
        ([16] * 9, [64, 128, 3 * 64], [1, 2, 3, 3], [9, 7, 4, 1]),
        ([16, 1000, 16], [128], [2, 1], [2, 1]),  # a larger parameter is not cut
    ],
)
def test_a_bucket_is_closed_when_it_is_full_and_ready_with_its_last_parameter(
    sizes, lengths, counts, ready
):
    _, buffer = make(sizes, *lengths)
    assert [len(b.parameters) for b in buffer.buckets] == counts
    assert [b.ready_at for b in buffer.buckets] == ready


def test_buckets_cover_the_flat_arrays_without_gaps():
    parameters, buffer = make([5, 40, 3, 7, 100, 1], 200)
    assert buffer.buckets[0].start == 0
    assert buffer.buckets[-1].stop == buffer.size
    for before, after in zip(buffer.buckets, buffer.buckets[1:], strict=False):
        assert before.stop == after.start
        assert before.index + 1 == after.index
    by_name = {p.name: p for p in parameters}
    for bucket in buffer.buckets:
        for entry in bucket.parameters:
            part = bucket.values[entry.slice].reshape(entry.shape)
            assert part.ctypes.data == by_name[entry.name].value.ctypes.data
            assert part.shape == by_name[entry.name].shape


def test_store_grad_overwrites_or_adds():
    (p,), buffer = make([3], 1 << 20)
    p.store_grad(np.array([1.0, 2.0, 3.0]))
    p.store_grad(np.array([1.0, 1.0, 1.0]))
    np.testing.assert_array_equal(p.grad, [1, 1, 1])
    buffer.accumulate = True
    p.store_grad(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(p.grad, [2, 3, 4])
    gradient, p.frozen = p.grad, True
    p.store_grad(np.ones(3))  # as layers of users do
    np.testing.assert_array_equal(gradient, [2, 3, 4])
    p.frozen = False
    with pytest.raises(ValueError, match=r"store_grad expected .* \(3,\), .* got \(\)"):
        p.store_grad(np.array(6.0))


def test_initial_values_depend_on_the_seed_and_the_name_alone():
    first = Sequential(Linear(4, name="a"), Linear(3, name="b"))
    second = Sequential(Linear(4, name="c"), ReLU(), Linear(3, name="b"))
    weights = [
        Model(net, (4,), backend="numpy", seed=seed).parameters["b.w"].value
        for net, seed in ((first, 1), (second, 1), (Sequential(Linear(4), Linear(3, name="b")), 2))
    ]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).any()


def small_net() -> Sequential:
    return Sequential(Conv2d(5, 3), BatchNorm(), ReLU(), Flatten(), Linear(7), ReLU(), Linear(3))


def test_padding_stays_zero_through_training_steps(backend):
    model = Model(small_net(), (5, 5, 3), backend=backend, bucket_bytes=256)
    x = np.random.default_rng(0).normal(size=(4, 5, 5, 3)).astype("float32")
    for accumulate in (False, True):
        y, residuals = model.forward(x, StepContext(training=True))
        model.backward(np.ones(y.shape), residuals, accumulate=accumulate)
    (buffer,) = model.buffers
    inside = np.zeros(buffer.size, bool)
    for bucket in model.buckets:
        for entry in bucket.parameters:
            inside[bucket.start + entry.slice.start : bucket.start + entry.slice.stop] = True
    assert inside.sum() == sum(p.size for p in model.parameters.values())
    assert not inside.all()
    assert (backend.to_numpy(buffer.values)[~inside] == 0).all()
    assert (backend.to_numpy(buffer.grads)[~inside] == 0).all()


def test_buckets_lie_in_the_order_in_which_backward_completes_them():
    model = Model(small_net(), (5, 5, 3), backend="numpy")
    layers = [name.split(".")[0] for name in model.parameters]
    expected = ["linear6", "linear6", "linear4", "linear4", "batchnorm1", "batchnorm1"]
    assert layers == [*expected, "conv2d0", "conv2d0"]


def test_gradients_can_be_written_to_several_sets_of_arrays():
    parameters, buffer = make([3, 20, 5], 64)
    bucket = buffer.buckets[1]
    for slot in (0, 2, 1):
        buffer.write_to(slot)
        for p in parameters:
            p.grad[...] = slot + 1
    for slot in range(3):
        entry = bucket.parameters[0]
        np.testing.assert_array_equal(bucket.gradients(slot)[entry.slice], slot + 1.0)
    buffer.write_to(0)
    assert parameters[1].grad.base is bucket.grads.base
    assert bucket.gradients(0).ctypes.data == bucket.grads.ctypes.data
