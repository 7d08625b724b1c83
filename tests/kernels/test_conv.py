"""Compiled convolutions against the reference, on every instruction set of the machine."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import ConvGeometry, create_backend
from pydtnn.kernels.cpu import volumes
from pydtnn.kernels.cpu.conv import candidates
from pydtnn.kernels.reference import ConvKernels
from tests.each import each
from tests.kernels.geometries import CASES, EVERY, geometry
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded

REFERENCE = ConvKernels(np)
DIRECTIONS = ("forward", "backward_data", "backward_filter")

# In norm. float32: sums of up to 2,000 products of both signs lose about sqrt(2000) / 2 of their
# last places of 6e-8, a few 1e-6; float64 the same in units of 1e-16.
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}


Arrays = dict[str, np.ndarray]
Once = Callable[..., Any]


def operands(rng: np.random.Generator, batch: int, geometry: ConvGeometry) -> dict[str, np.ndarray]:
    """Float64 arrays x, w, b, dy for a geometry."""
    return {
        "x": rng.standard_normal((batch, *geometry.size, geometry.channels)),
        "w": rng.standard_normal(geometry.weight_shape),
        "b": rng.standard_normal(geometry.filters),
        "dy": rng.standard_normal((batch, *geometry.output, geometry.filters)),
    }


def seeded(case: str) -> np.random.Generator:
    """A generator of its own for each case."""
    return np.random.default_rng(zlib.crc32(case.encode()))


def run(
    conv: ConvKernels,
    direction: str,
    arrays: dict[str, np.ndarray],
    geometry: ConvGeometry,
    **options: Any,
) -> np.ndarray:
    """One direction of a family on guarded copies, into an output full of NaN."""
    x, w, b, dy = (guarded(arrays[name]) for name in ("x", "w", "b", "dy"))
    like = {"forward": dy, "backward_data": x, "backward_filter": w}[direction]
    out = guarded(np.full_like(like, np.nan))
    if direction == "forward":
        conv.forward(x, w, b, geometry, out=out, **options)
    elif direction == "backward_data":
        conv.backward_data(dy, w, geometry, out=out, **options)
    else:
        conv.backward_filter(x, dy, geometry, out=out, **options)
    assert_guards_hold(out)
    return out


def cast(arrays: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """Copy in another type."""
    return {name: array.astype(dtype) for name, array in arrays.items()}


def directions(arrays: Arrays, geometry: ConvGeometry) -> Arrays:
    """What the reference computes, in float64."""
    exact = cast(arrays, np.float64)
    return {direction: run(REFERENCE, direction, exact, geometry) for direction in DIRECTIONS}


def expected(case: str, dtype: Any) -> tuple[Arrays, Arrays]:
    """Operands of a type, and what is expected of them."""
    arrays = cast(operands(seeded(case), *CASES[case]), dtype)
    return arrays, directions(arrays, CASES[case][1])


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few planes at a time, so that parts end within volumes."""
    monkeypatch.setattr(volumes, "PLANES_BYTES", 20_000)


@pytest.mark.covering(2)
@pytest.mark.few(55)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_all_directions_agree_with_the_reference(cpu_backend, once, case, algorithm, dtype):
    arrays, exact = once(expected, case, dtype)
    for direction in DIRECTIONS:
        value = run(cpu_backend.conv, direction, arrays, CASES[case][1], algorithm=algorithm)
        assert value.dtype == dtype
        assert_close(value, exact[direction], TOLERANCE[dtype])


KERNELS = [*((k, k) for k in (3, 5)), *((1, k) for k in (3, 5, 7)), *((k, 1) for k in (3, 5, 7))]
"""Of Winograd's algorithms; with a stride of 2 they are square, and 3 to 7."""


def random_geometries(kind: str) -> list[tuple[ConvGeometry, Arrays, Arrays]]:
    """Geometries, operands and what is expected of them."""
    rng, found = seeded(kind), []
    axes = 2 if kind == "Winograd" else int(kind[0])

    def draw(least: int, most: int) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(least, most, axes)))

    for number in range(60 if axes == 2 else 15):
        stride, dilation, groups = draw(1, 4), draw(1, 3), int(rng.integers(1, 4))
        kernel, size = draw(1, 5 if axes == 3 else 8), draw(1, 6 if axes == 3 else 12)
        padding = tuple((int(p), int(q)) for p, q in rng.integers(0, 4, (axes, 2)))
        most = 9 if axes == 3 else 36
        if kind == "Winograd":
            kernel, stride, dilation, groups, most = KERNELS[number % 8], (1, 1), (1, 1), 1, 70
            if number % 5 == 0:
                kernel, stride = (int(rng.choice([3, 5, 7])),) * 2, (2, 2)
            padding = tuple((k // 2, int(rng.integers(k // 2, k))) for k in kernel)
        size = tuple(n + d * (k - 1) for n, k, d in zip(size, kernel, dilation, strict=True))
        channels, filters = (groups * int(n) for n in rng.integers(1, most, 2))
        if kind != "Winograd" and number % 4 == 1:
            channels = groups  # each has filters of its own
        shape = ConvGeometry(size, kernel, stride, padding, dilation, channels, filters, groups)
        arrays = operands(rng, int(rng.integers(1, 5)), shape)
        found.append((shape, arrays, directions(arrays, shape)))
    return found


@pytest.mark.parametrize("kind", ["1 axis", "2 axes", "3 axes", "Winograd"])
def test_random_geometries_agree_with_the_reference(cpu_backend, once, kind):
    """Whose gradients are the adjoint of forward."""
    for shape, arrays, exact in once(random_geometries, kind):
        for direction, algorithm in product(DIRECTIONS, candidates(shape)):
            value = run(cpu_backend.conv, direction, arrays, shape, algorithm=algorithm)
            assert_close(value, exact[direction], 1e-12)
        dx, dw = np.empty_like(arrays["x"]), np.empty_like(arrays["w"])
        x, dy, w = arrays["x"], arrays["dy"], arrays["w"]
        cpu_backend.conv.backward(x, dy, w, shape, dx=dx, dw=dw)
        assert_close(dx, exact["backward_data"], 1e-12)
        assert_close(dw, exact["backward_filter"], 1e-12)
        y = exact["forward"] - arrays["b"]
        bound = 1e-12 * np.linalg.norm(dy) * np.linalg.norm(y)
        assert abs(np.vdot(exact["backward_data"], x) - np.vdot(dy, y)) <= bound
        assert abs(np.vdot(exact["backward_filter"], w) - np.vdot(dy, y)) <= bound


def test_long_sums_keep_the_accuracy_of_float32(cpu_backend, rng):
    # Positive terms: one running float32 sum of 65,536 would be off by 1e-4.
    shape = geometry((32, 32), 1, 2, (1, 1))
    x = rng.random((64, 32, 32, 1), dtype=np.float32)
    dy = rng.random((64, 32, 32, 2), dtype=np.float32)
    out = np.empty(shape.weight_shape, np.float32)
    cpu_backend.conv.backward_filter(x, dy, shape, out=out)
    exact = np.tensordot(dy.astype(np.float64), x.astype(np.float64), ((0, 1, 2), (0, 1, 2)))
    assert_close(out.reshape(2, 1), exact, 2e-6)


def test_an_output_of_the_wrong_size_is_refused(cpu_backend):
    shape = geometry((8, 8), 3, 4, (3, 3), padding=1)
    x, w = np.zeros((2, 8, 8, 3), np.float32), np.zeros((4, 3, 3, 3), np.float32)
    with pytest.raises(ValueError, match="elements"):
        cpu_backend.conv.forward(x, w, None, shape, out=np.empty((2, 8, 7, 4), np.float32))


@each("axes", [2, 3])
@each("tuning", ["direct", "measure"])
@each("offset", [0, 2])
def test_gradients_may_overwrite_x_and_outputs_never_what_they_are_gathered_from(
    axes, offset, tuning
):
    conv, rng = create_backend("cpu", tuning=tuning).conv, np.random.default_rng(axes)
    shape = geometry((8,) * axes, 16, 16, (3,) * axes, padding=1)
    memory = rng.normal(size=(4 + offset, *shape.size, 16))
    read, written = memory[:4], memory[offset:]
    x, w, dw = read.copy(), np.ones(shape.weight_shape), np.empty(shape.weight_shape)
    with pytest.raises(ValueError, match=r"conv\.forward: out and x overlap in memory"):
        conv.forward(read, w, None, shape, out=written)
    with pytest.raises(ValueError, match=r"conv\.backward_data: out and dy overlap in memory"):
        conv.backward_data(read, w, shape, out=written)
    with pytest.raises(ValueError, match="overlap in memory"):
        conv.backward(x, read, w, shape, dx=written, dw=dw)
    np.testing.assert_array_equal(read, x)
    dy, w = rng.normal(size=x.shape), rng.normal(size=w.shape)
    expected_dx, expected_dw = np.empty_like(x), np.empty_like(w)
    REFERENCE.backward(x, dy, w, shape, dx=expected_dx, dw=expected_dw)
    conv.backward(read, dy, w, shape, dx=written, dw=dw)  # the first one is measured
    # Winograd's transforms lose a few times what direct sums do
    np.testing.assert_allclose(written, expected_dx, rtol=0, atol=1e-11)
    np.testing.assert_allclose(dw, expected_dw, rtol=0, atol=1e-11)


@each(
    "fields, sentence",
    [
        *(({name: 0}, ".*at least 1") for name in ("channels", "filters", "groups", "stride")),
        ({"dilation": 0}, ".*at least 1"),
        ({"groups": 3, "filters": 6}, ".*be divisible by groups, got 4 channels, 6 filters and 3"),
        ({"groups": 2, "filters": 5}, ".*be divisible by groups, got 4 channels, 5 filters and 2"),
        ({"padding": -1}, r".*padding must not be negative, got \(\(-1, -1\), \(-1, -1\)\); cut"),
        ({"padding": ((0, 0), (1, -1))}, r".*padding must not be negative, got .*\(1, -1\)\); cut"),
    ],
)
def test_a_geometry_that_kernels_do_not_compute_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=f"^convolution: {sentence}"):
        geometry((8, 8), **{"channels": 4, "filters": 4, "kernel": (3, 3), **fields})


@each("axes", [1, 2, 3])
def test_a_gradient_of_filters_is_nan_if_nan_is_multiplied_by_zero(backend, axes):
    shape = geometry((2,) * axes, 17, 1, (1,) * axes, stride=2)
    x, dy = np.ones((1, *shape.size, 17)), np.zeros((1, *shape.output, 1))
    x[0, ..., 3] = np.nan
    dw = backend.asarray(np.ones(shape.weight_shape))
    backend.conv.backward_filter(backend.asarray(x), backend.asarray(dy), shape, out=dw)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(backend.to_numpy(dw))), [3])


def test_the_reference_does_not_multiply_padding():
    shape = geometry((4, 4), 2, 3, (3, 3), padding=1)
    x, dy = np.ones((1, 4, 4, 2)), np.ones((1, 4, 4, 3))
    w, y, dw = np.ones(shape.weight_shape), np.empty_like(dy), np.empty(shape.weight_shape)
    w[0, 0, 0, 0] = dy[0, 0, 0, 1] = np.nan
    REFERENCE.forward(x, w, None, shape, out=y)
    REFERENCE.backward_filter(x, dy, shape, out=dw)
    inside = np.arange(4) > 0  # where the first tap is
    np.testing.assert_array_equal(np.isnan(y[0, :, :, 0]), np.outer(inside, inside))
    inside = np.arange(3) > 0  # of the kernel, at the first pixel
    np.testing.assert_array_equal(np.isnan(dw[1, :, :, 0]), np.outer(inside, inside))
    assert not np.isnan(y[..., 1:]).any()
    assert not np.isnan(dw[[0, 2]]).any()
