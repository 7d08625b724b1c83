"""Compiled convolutions against the reference, on every instruction set of the machine."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, ConvGeometry, create_backend
from pydtnn.kernels.cpu.conv import Conv, candidates
from pydtnn.kernels.reference import Conv as Reference
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded

REFERENCE = Reference(np)
DIRECTIONS = ("forward", "backward_data", "backward_filter")

# In norm. float32: sums of up to 2,000 products of both signs lose about sqrt(2000) / 2 of their
# last places of 6e-8, a few 1e-6; float64 the same in units of 1e-16.
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}


def geometry(
    size: tuple[int, ...],
    channels: int,
    filters: int,
    kernel: tuple[int, ...],
    stride: int = 1,
    padding: Any = 0,
    dilation: int = 1,
    groups: int = 1,
) -> ConvGeometry:
    """Shorthand: equal strides and dilations; padding is a number or pairs."""
    axes = len(size)
    pairs = ((padding, padding),) * axes if isinstance(padding, int) else padding
    return ConvGeometry(
        size, kernel, (stride,) * axes, pairs, (dilation,) * axes, channels, filters, groups
    )


AWKWARD = {
    "one of everything": (1, geometry((1, 1), 1, 1, (1, 1))),
    "no image": (0, geometry((8, 8), 5, 7, (3, 3), padding=1)),
    "first layer": (3, geometry((32, 32), 3, 16, (3, 3), padding=1)),
    "first layer, 7 by 7, stride 2": (2, geometry((23, 21), 3, 64, (7, 7), 2, 3)),
    "one channel": (2, geometry((9, 11), 1, 32, (3, 3), padding=1)),
    "16 filters": (2, geometry((32, 32), 16, 16, (3, 3), padding=1)),
    "several images to a block": (21, geometry((8, 8), 64, 64, (3, 3), padding=1)),
    "rows of a large image": (2, geometry((91, 67), 5, 9, (3, 3), padding=1)),
    "a row larger than the cache": (1, geometry((5, 1999), 40, 3, (3, 3), padding=1)),
    "primes": (5, geometry((13, 11), 7, 19, (3, 5), padding=((1, 2), (0, 3)))),
    "three vectors of filters": (2, geometry((9, 9), 17, 53, (3, 3), padding=1)),
    "pointwise": (3, geometry((7, 9), 33, 41, (1, 1))),
    "pointwise, padding at the end": (3, geometry((55,), 27, 5, (1,), padding=((0, 1),))),
    "pointwise, stride 2": (3, geometry((7, 9), 16, 32, (1, 1), stride=2)),
    "pointwise, 65 channels": (7, geometry((7, 9), 65, 70, (1, 1))),
    "64 channels, 200 filters": (2, geometry((13, 17), 64, 200, (1, 3), padding=((0, 0), (1, 1)))),
    "67 channels, stride 2": (3, geometry((11, 9), 67, 71, (3, 2), 2, ((1, 0), (0, 1)))),
    "stride 2": (3, geometry((16, 16), 16, 32, (3, 3), stride=2, padding=1)),
    "stride 2, odd size, asymmetric": (2, geometry((15, 17), 6, 10, (3, 3), 2, ((0, 1), (1, 0)))),
    "stride 3 beyond the kernel": (2, geometry((17, 16), 5, 6, (2, 2), stride=3)),
    "stride 3, kernel 7": (2, geometry((23, 29), 3, 18, (7, 7), stride=3, padding=3)),
    "rows that nothing reads": (2, geometry((10, 11), 4, 5, (3, 3), stride=4)),
    "dilation 2": (2, geometry((12, 13), 16, 20, (3, 3), padding=2, dilation=2)),
    "dilation 2, stride 2": (2, geometry((13, 14), 5, 6, (3, 3), 2, 2, 2)),
    "dilation 2, stride 3": (2, geometry((19, 14), 5, 6, (4, 3), 3, 1, 2)),
    "even kernel": (2, geometry((9, 8), 8, 8, (2, 2), padding=((1, 0), (0, 1)))),
    "4 by 3": (2, geometry((9, 8), 8, 24, (4, 3), padding=((2, 1), (1, 1)))),
    "kernel as large as the image": (4, geometry((5, 5), 6, 11, (5, 5))),
    "padding beyond the kernel": (2, geometry((4, 4), 3, 4, (2, 2), padding=3)),
    "three groups": (2, geometry((9, 10), 12, 21, (3, 3), padding=1, groups=3)),
    "groups of one vector": (2, geometry((9, 10), 48, 48, (3, 3), padding=1, groups=3)),
    "one vector, two columns of padding": (2, geometry((7, 6), 16, 16, (3, 3), padding=2)),
    "groups of whole vectors": (2, geometry((9, 10), 64, 64, (3, 3), 2, 1, groups=2)),
    "groups, dilation 2": (2, geometry((9, 10), 10, 20, (3, 3), 1, 2, 2, groups=5)),
    "depthwise": (3, geometry((9, 10), 37, 37, (3, 3), padding=1, groups=37)),
    "depthwise, 16 channels, no padding": (3, geometry((9, 10), 16, 16, (3, 3), groups=16)),
    "depthwise, stride 2, 5 by 5": (3, geometry((11, 10), 21, 21, (5, 5), 2, 2, groups=21)),
    "depthwise, dilation 2": (3, geometry((11, 10), 33, 33, (3, 3), 1, 2, 2, groups=33)),
    "depthwise, no image": (0, geometry((9, 10), 20, 20, (3, 3), padding=1, groups=20)),
    "depthwise, a single row": (3, geometry((1, 13), 5, 5, (3, 3), padding=1, groups=5)),
    "depthwise, a single column": (3, geometry((7, 1), 17, 17, (3, 3), padding=1, groups=17)),
    "depthwise, 2 by 3": (5, geometry((2, 3), 40, 40, (3, 3), padding=1, groups=40)),
    "depthwise, 7 by 7": (9, geometry((7, 7), 71, 71, (3, 3), padding=1, groups=71)),
    "depthwise, stride 2, even": (3, geometry((14, 16), 35, 35, (3, 3), 2, 1, groups=35)),
    "depthwise, stride 2, odd": (3, geometry((13, 15), 33, 33, (3, 3), 2, 1, groups=33)),
    "depthwise, stride 2, padding at the end": (
        2,
        geometry((16, 12), 18, 18, (3, 3), 2, ((0, 1), (0, 1)), groups=18),
    ),
    "depthwise, 5 by 5": (3, geometry((11, 17), 19, 19, (5, 5), padding=2, groups=19)),
    "depthwise, 7 by 4": (2, geometry((9, 19), 6, 6, (7, 4), 1, ((3, 3), (2, 1)), groups=6)),
    "depthwise, stride 3 beyond the kernel": (2, geometry((17, 16), 9, 9, (2, 2), 3, groups=9)),
    "depthwise, dilation 2, stride 3": (2, geometry((19, 14), 5, 5, (4, 3), 3, 1, 2, groups=5)),
    "depthwise, padding beyond the kernel": (2, geometry((4, 4), 7, 7, (2, 2), 1, 3, groups=7)),
    "depthwise, rows of a large image": (
        1,
        geometry((61, 59), 160, 160, (3, 3), padding=1, groups=160),
    ),
    "depthwise, rows of a large image, stride 2": (
        1,
        geometry((61, 58), 160, 160, (3, 3), 2, 1, groups=160),
    ),
    "depthwise, rows larger than a block": (
        1,
        geometry((3, 2003), 133, 133, (3, 3), padding=1, groups=133),
    ),
    "depthwise, one axis": (3, geometry((50,), 9, 9, (3,), stride=2, padding=1, groups=9)),
    "depthwise, two filters a channel": (3, geometry((9, 10), 9, 18, (3, 3), 1, 1, groups=9)),
    "one axis": (3, geometry((50,), 6, 9, (5,), stride=2, padding=((1, 2),))),
    "three axes": (2, geometry((4, 5, 6), 3, 4, (3, 2, 3), padding=1)),
}


Arrays = dict[str, np.ndarray]
Once = Callable[..., Any]

ALGORITHMS = [(case, name) for case, (_, shape) in AWKWARD.items() for name in candidates(shape)]
"""Every case with every algorithm that suits it."""


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
    conv: Reference,
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


def all_directions(
    case: str, batch: int, geometry: ConvGeometry, dtype: Any
) -> tuple[Arrays, Arrays]:
    """Operands of a type, and what is expected of them."""
    arrays = cast(operands(seeded(case), batch, geometry), dtype)
    return arrays, directions(arrays, geometry)


@pytest.mark.few(100)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_all_directions_agree_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str, dtype: Any
) -> None:
    batch, geometry = AWKWARD[case]
    arrays, expected = once(all_directions, case, batch, geometry, dtype)
    for direction in DIRECTIONS:
        value = run(cpu_backend.conv, direction, arrays, geometry, algorithm=algorithm)
        assert value.dtype == dtype
        assert_close(value, expected[direction], TOLERANCE[dtype])


def random_geometries() -> list[tuple[ConvGeometry, Arrays, Arrays]]:
    """Geometries, operands and what is expected of them."""
    rng, found = np.random.default_rng(0), []
    for _ in range(60):
        kernel = tuple(map(int, rng.integers(1, 8, 2)))
        stride, dilation = (
            tuple(map(int, rng.integers(1, 4, 2))),
            tuple(map(int, rng.integers(1, 3, 2))),
        )
        padding = tuple((int(p), int(q)) for p, q in rng.integers(0, 4, (2, 2)))
        size = tuple(
            int(n) + d * (k - 1)
            for n, k, d in zip(rng.integers(1, 12, 2), kernel, dilation, strict=True)
        )
        groups = int(rng.integers(1, 4))
        channels, filters = (groups * int(n) for n in rng.integers(1, 36, 2))
        shape = ConvGeometry(size, kernel, stride, padding, dilation, channels, filters, groups)
        arrays = operands(rng, int(rng.integers(1, 5)), shape)
        found.append((shape, arrays, directions(arrays, shape)))
    return found


def test_random_geometries_agree_with_the_reference(cpu_backend: Backend, once: Once) -> None:
    for shape, arrays, expected in once(random_geometries):
        for direction in DIRECTIONS:
            value = run(cpu_backend.conv, direction, arrays, shape)
            assert_close(value, expected[direction], 1e-12)


@pytest.mark.few(50)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_backward_of_data_is_the_adjoint_of_forward(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    arrays["b"][...] = 0
    y = run(cpu_backend.conv, "forward", arrays, geometry, algorithm=algorithm)
    dx = run(cpu_backend.conv, "backward_data", arrays, geometry, algorithm=algorithm)
    dw = run(cpu_backend.conv, "backward_filter", arrays, geometry, algorithm=algorithm)
    product = np.vdot(arrays["dy"], y)
    size = np.linalg.norm(arrays["dy"]) * np.linalg.norm(y)
    assert abs(np.vdot(dx, arrays["x"]) - product) <= 1e-12 * size
    assert abs(np.vdot(dw, arrays["w"]) - product) <= 1e-12 * size


@pytest.mark.few(50)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_the_number_of_threads_does_not_change_a_byte(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = cast(operands(rng, batch, geometry), np.float32)
    one, *others = (create_backend("cpu", threads=n, isa=cpu_backend.isa).conv for n in (1, 2, 5))
    for direction in DIRECTIONS:
        expected = run(one, direction, arrays, geometry, algorithm=algorithm).tobytes()
        for conv in others:
            assert run(conv, direction, arrays, geometry, algorithm=algorithm).tobytes() == expected


@pytest.mark.parametrize(
    "case", ["first layer", "three groups", "depthwise", "no image", "one axis"]
)
def test_backward_of_filters_adds_to_its_output_when_told_to(
    cpu_backend: Backend, rng: np.random.Generator, case: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    before = rng.standard_normal(geometry.weight_shape)
    out = guarded(before)
    cpu_backend.conv.backward_filter(arrays["x"], arrays["dy"], geometry, out=out, accumulate=True)
    assert_guards_hold(out)
    assert_close(out - before, run(REFERENCE, "backward_filter", arrays, geometry), 1e-12)


def test_forward_works_without_a_bias(cpu_backend: Backend, rng: np.random.Generator) -> None:
    for case in ("first layer", "three groups", "depthwise"):
        batch, geometry = AWKWARD[case]
        arrays = operands(rng, batch, geometry)
        out, expected = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
        cpu_backend.conv.forward(arrays["x"], arrays["w"], None, geometry, out=out)
        REFERENCE.forward(arrays["x"], arrays["w"], None, geometry, out=expected)
        assert_close(out, expected, 1e-12)


def test_arrays_that_are_not_contiguous_give_the_same_result(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    batch, geometry = AWKWARD["primes"]
    arrays = operands(rng, batch, geometry)
    fortran = {name: np.asfortranarray(array) for name, array in arrays.items()}
    for direction in DIRECTIONS:
        like = {"forward": "dy", "backward_data": "x", "backward_filter": "w"}[direction]
        out = np.asfortranarray(np.empty_like(arrays[like]))
        if direction == "forward":
            cpu_backend.conv.forward(fortran["x"], fortran["w"], fortran["b"], geometry, out=out)
        elif direction == "backward_data":
            cpu_backend.conv.backward_data(fortran["dy"], fortran["w"], geometry, out=out)
        else:
            cpu_backend.conv.backward_filter(fortran["x"], fortran["dy"], geometry, out=out)
        assert_close(out, run(REFERENCE, direction, arrays, geometry), 1e-12)


def test_long_sums_keep_the_accuracy_of_float32(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    # Positive terms: one running float32 sum of 65,536 would be off by 1e-4.
    shape = geometry((32, 32), 1, 2, (1, 1))
    x = rng.random((64, 32, 32, 1), dtype=np.float32)
    dy = rng.random((64, 32, 32, 2), dtype=np.float32)
    out = np.empty(shape.weight_shape, np.float32)
    cpu_backend.conv.backward_filter(x, dy, shape, out=out)
    exact = np.tensordot(dy.astype(np.float64), x.astype(np.float64), ((0, 1, 2), (0, 1, 2)))
    assert_close(out.reshape(2, 1), exact, 2e-6)


def test_an_output_of_the_wrong_size_is_refused(cpu_backend: Backend) -> None:
    shape = geometry((8, 8), 3, 4, (3, 3), padding=1)
    x, w = np.zeros((2, 8, 8, 3), np.float32), np.zeros((4, 3, 3, 3), np.float32)
    with pytest.raises(ValueError, match="elements"):
        cpu_backend.conv.forward(x, w, None, shape, out=np.empty((2, 8, 7, 4), np.float32))


def test_hot_kernels_are_compiled(cpu_backend: Backend) -> None:
    assert isinstance(cpu_backend.conv, Conv)
    for direction in DIRECTIONS:
        assert getattr(Conv, direction) is not getattr(Reference, direction)


OVERLAP = geometry((8, 8), 16, 16, (3, 3), padding=1)


def overlapping(rng: np.random.Generator, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of the shape that `OVERLAP` reads and writes, one `offset` images behind."""
    memory = rng.normal(size=(4 + offset, 8, 8, 16))
    return memory[:4], memory[offset:]


@pytest.mark.parametrize("tuning", ["direct", "measure"])
@pytest.mark.parametrize("offset", [0, 2])
def test_an_output_over_the_input_that_it_is_gathered_from_is_refused(
    offset: int, tuning: str
) -> None:
    backend = create_backend("cpu", tuning=tuning)
    read, written = overlapping(np.random.default_rng(0), offset)
    x, w = read.copy(), np.ones(OVERLAP.weight_shape)
    with pytest.raises(ValueError, match="conv.forward: out and x overlap in memory"):
        backend.conv.forward(read, w, None, OVERLAP, out=written)
    with pytest.raises(ValueError, match="conv.backward_data: out and dy overlap in memory"):
        backend.conv.backward_data(read, w, OVERLAP, out=written)
    with pytest.raises(ValueError, match="overlap in memory"):
        backend.conv.backward(x, read, w, OVERLAP, dx=written, dw=np.empty_like(w))
    np.testing.assert_array_equal(read, x)


@pytest.mark.parametrize("tuning", ["direct", "measure"])
@pytest.mark.parametrize("offset", [0, 2])
def test_both_gradients_are_right_where_dx_lies_over_x(offset: int, tuning: str) -> None:
    backend = create_backend("cpu", tuning=tuning)
    rng = np.random.default_rng(1)
    x, dx = overlapping(rng, offset)
    dy, w = rng.normal(size=x.shape), rng.normal(size=OVERLAP.weight_shape)
    expected_dx, expected_dw, dw = np.empty_like(x), np.empty_like(w), np.empty_like(w)
    REFERENCE.backward_filter(x, dy, OVERLAP, out=expected_dw)
    REFERENCE.backward_data(dy, w, OVERLAP, out=expected_dx)
    backend.conv.backward(x, dy, w, OVERLAP, dx=dx, dw=dw)  # the first one is measured
    # Winograd's transforms lose a few times what direct sums do
    np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=1e-11)
    np.testing.assert_allclose(dw, expected_dw, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "fields",
    [{"channels": 0}, {"filters": 0}, {"groups": 0}, {"stride": 0}, {"dilation": 0}],
    ids=str,
)
def test_a_geometry_of_nothing_is_refused_in_one_sentence(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="convolution: .*at least 1"):
        geometry((8, 8), **{"channels": 4, "filters": 4, "kernel": (3, 3), **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"groups": 3, "filters": 6}, "be divisible by groups, got 4 channels, 6 filters and 3"),
        ({"groups": 2, "filters": 5}, "be divisible by groups, got 4 channels, 5 filters and 2"),
        ({"padding": -1}, r"padding must not be negative, got \(\(-1, -1\), \(-1, -1\)\); cut"),
        ({"padding": ((0, 0), (1, -1))}, r"padding must not be negative, got .*\(1, -1\)\); cut"),
    ],
)
def test_a_geometry_that_kernels_do_not_compute_is_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^convolution: .*{sentence}"):
        geometry((8, 8), **{"channels": 4, "filters": 4, "kernel": (3, 3), **fields})


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_gradient_of_filters_is_nan_if_nan_is_multiplied_by_zero(
    backend: Backend, axes: int
) -> None:
    shape = geometry((2,) * axes, 17, 1, (1,) * axes, stride=2)
    x, dy = np.ones((1, *shape.size, 17)), np.zeros((1, *shape.output, 1))
    x[0, ..., 3] = np.nan
    dw = backend.asarray(np.ones(shape.weight_shape))
    backend.conv.backward_filter(backend.asarray(x), backend.asarray(dy), shape, out=dw)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(backend.to_numpy(dw))), [3])


def test_the_reference_does_not_multiply_padding() -> None:
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
