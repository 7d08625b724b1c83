"""Convolutions of volumes against the reference, on every instruction set of the machine."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, ConvGeometry, Deferred, Term, create_backend
from pydtnn.kernels.cpu import volumes
from pydtnn.kernels.cpu.conv import candidates
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import (
    DIRECTIONS,
    REFERENCE,
    TOLERANCE,
    Once,
    all_directions,
    cast,
    geometry,
    operands,
    run,
)

AWKWARD = {
    "one of everything": (1, geometry((1, 1, 1), 1, 1, (1, 1, 1))),
    "no volume": (0, geometry((4, 5, 6), 3, 4, (3, 3, 3), padding=1)),
    "first layer": (2, geometry((6, 9, 8), 4, 32, (3, 3, 3), padding=1)),
    "even kernel": (2, geometry((5, 6, 7), 3, 5, (2, 2, 2), padding=((0, 1),) * 3)),
    "primes": (3, geometry((7, 5, 11), 5, 19, (3, 5, 2), padding=((2, 0), (0, 3), (1, 1)))),
    "pointwise": (2, geometry((3, 5, 4), 17, 33, (1, 1, 1))),
    "taps along the depth only": (2, geometry((7, 3, 4), 6, 8, (5, 1, 1))),
    "a plane": (2, geometry((1, 8, 9), 16, 16, (1, 3, 3), padding=((0, 0), (1, 1), (1, 1)))),
    "stride 2": (2, geometry((7, 8, 9), 6, 10, (3, 3, 3), 2, 1)),
    "stride 3 beyond the kernel": (2, geometry((11, 8, 9), 4, 5, (2, 2, 2), 3)),
    "depths that nothing reads": (2, geometry((10, 6, 5), 3, 4, (1, 2, 2), 4)),
    "dilation 2": (2, geometry((8, 7, 9), 5, 6, (3, 2, 3), 1, 2, 2)),
    "kernel as large as the volume": (3, geometry((4, 3, 5), 6, 7, (4, 3, 5))),
    "padding beyond the kernel": (2, geometry((3, 2, 3), 3, 4, (2, 2, 2), padding=3)),
    "three groups": (2, geometry((5, 6, 4), 12, 21, (3, 3, 3), padding=1, groups=3)),
    "depthwise": (2, geometry((5, 6, 4), 9, 9, (3, 3, 3), padding=1, groups=9)),
    "depthwise, one channel": (2, geometry((4, 5, 6), 1, 3, (3, 2, 3), padding=1)),
    "depthwise, no volume": (0, geometry((4, 5, 6), 3, 3, (3, 3, 3), padding=1, groups=3)),
    "depthwise, filters of a channel": (2, geometry((5, 6, 7), 5, 15, (3, 3, 3), 1, 1, groups=5)),
    "depthwise, stride 2": (2, geometry((9, 8, 7), 17, 17, (3, 3, 3), 2, 1, groups=17)),
    "depthwise, stride 3, even": (2, geometry((11, 8, 9), 4, 4, (2, 2, 2), 3, groups=4)),
    "depthwise, dilation": (2, geometry((8, 7, 9), 6, 6, (3, 2, 3), 2, 2, 2, groups=6)),
    "depthwise, uneven": (
        3,
        geometry((7, 5, 11), 19, 19, (3, 5, 2), padding=((2, 0), (0, 3), (1, 1)), groups=19),
    ),
    "depthwise, far padding": (2, geometry((3, 2, 3), 4, 4, (2, 2, 2), padding=3, groups=4)),
    "one row": (2, geometry((6, 1, 7), 4, 5, (3, 1, 3), padding=((1, 1), (0, 0), (1, 1)))),
}  # fmt: skip
ALGORITHMS = [(case, name) for case, (_, shape) in AWKWARD.items() for name in candidates(shape)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few planes at a time, so that parts end within volumes."""
    monkeypatch.setattr(volumes, "PLANES_BYTES", 20_000)


@pytest.mark.few(43)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_all_directions_agree_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str, dtype: Any
) -> None:
    batch, shape = AWKWARD[case]
    arrays, expected = once(all_directions, case, batch, shape, dtype)
    for direction in DIRECTIONS:
        value = run(cpu_backend.conv, direction, arrays, shape, algorithm=algorithm)
        assert value.dtype == dtype
        assert_close(value, expected[direction], TOLERANCE[dtype])


@pytest.mark.few(34)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("case", AWKWARD)
def test_both_gradients_at_once_are_those_of_the_two_kernels(
    cpu_backend: Backend, rng: np.random.Generator, case: str, accumulate: bool
) -> None:
    batch, shape = AWKWARD[case]
    arrays = operands(rng, batch, shape)
    before = rng.standard_normal(shape.weight_shape)
    dx, dw = np.full_like(arrays["x"], np.nan), before.copy()
    cpu_backend.conv.backward(
        *(arrays["x"], arrays["dy"], arrays["w"], shape), dx=dx, dw=dw, accumulate=accumulate
    )
    assert_close(dx, run(REFERENCE, "backward_data", arrays, shape), 1e-12)
    expected = run(REFERENCE, "backward_filter", arrays, shape)
    assert_close(dw, expected + before if accumulate else expected, 1e-12)


def test_random_geometries_agree_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    for _ in range(15):
        kernel, stride, dilation = (tuple(map(int, rng.integers(1, n, 3))) for n in (5, 4, 3))
        padding = tuple((int(p), int(q)) for p, q in rng.integers(0, 3, (3, 2)))
        size = tuple(
            int(n) + d * (k - 1)
            for n, k, d in zip(rng.integers(1, 6, 3), kernel, dilation, strict=True)
        )
        groups = int(rng.integers(1, 4))
        channels, filters = (groups * int(n) for n in rng.integers(1, 9, 2))
        shape = ConvGeometry(size, kernel, stride, padding, dilation, channels, filters, groups)
        arrays = operands(rng, int(rng.integers(1, 4)), shape)
        for direction in DIRECTIONS:
            expected = run(REFERENCE, direction, arrays, shape)
            assert_close(run(cpu_backend.conv, direction, arrays, shape), expected, 1e-12)


@pytest.mark.parametrize(
    "case", ["first layer", "primes", "three groups", "stride 2", "depthwise, stride 2"]
)
def test_the_number_of_threads_does_not_change_a_byte(
    cpu_backend: Backend, rng: np.random.Generator, case: str
) -> None:
    batch, shape = AWKWARD[case]
    arrays = cast(operands(rng, batch, shape), np.float32)
    one, *others = (create_backend("cpu", threads=n, isa=cpu_backend.isa).conv for n in (1, 2, 5))
    for direction in DIRECTIONS:
        expected = run(one, direction, arrays, shape).tobytes()
        assert all(run(conv, direction, arrays, shape).tobytes() == expected for conv in others)


def test_planes_are_what_the_taps_along_the_depth_read(cpu_backend: Backend) -> None:
    shape = geometry((4, 2, 3), 4, 2, (3, 1, 1), 2, ((1, 1), (0, 0), (0, 0)), groups=2)
    x = np.random.default_rng(0).normal(size=(2, 4, 2, 3, 4))
    found = np.empty((4, 2, 3, 3 * 4))
    cpu_backend.conv.kernels.unfold(x, volumes.depth_of(shape), 0, found, 1)  # type: ignore[attr-defined]
    for (n, o), group, tap in product(np.ndindex(2, 2), range(2), range(3)):
        depth, own = 2 * o + tap - 1, 6 * group + 2 * tap
        expected = x[n, depth, ..., 2 * group : 2 * group + 2] if 0 <= depth < 4 else 0
        assert (found[2 * n + o, ..., own : own + 2] == expected).all()
    with pytest.raises(ValueError, match=r"volumes: expected planes of 0\.\.4, got 1\.\.5"):
        cpu_backend.conv.kernels.unfold(x, volumes.depth_of(shape), 1, found, 1)  # type: ignore[attr-defined]


def test_forward_applies_a_relu_and_takes_deferred_inputs(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    batch, shape = AWKWARD["primes"]
    arrays = operands(rng, batch, shape)
    expected = np.maximum(run(REFERENCE, "forward", arrays, shape), 0)
    assert_close(run(cpu_backend.conv, "forward", arrays, shape, relu=True), expected, 1e-12)
    out = np.empty_like(expected)
    value = Deferred(Term(arrays["x"]))
    cpu_backend.conv.forward(value, arrays["w"], arrays["b"], shape, out=out, relu=True)
    assert_close(out, expected, 1e-12)


def test_an_output_over_the_input_is_refused(cpu_backend: Backend) -> None:
    shape = geometry((4, 4, 4), 2, 2, (3, 3, 3), padding=1)
    x, w = np.zeros((2, 4, 4, 4, 2)), np.ones(shape.weight_shape)
    with pytest.raises(ValueError, match=r"conv\.forward: out and x overlap in memory"):
        cpu_backend.conv.forward(x, w, None, shape, out=x)
    with pytest.raises(ValueError, match=r"conv\.backward_data: out and dy overlap in memory"):
        cpu_backend.conv.backward_data(x, w, shape, out=x)


def test_gradients_may_overwrite_the_input(cpu_backend: Backend, rng: np.random.Generator) -> None:
    batch, shape = AWKWARD["first layer"]
    arrays = operands(rng, batch, shape)
    dx, dw = arrays["x"].copy(), np.empty(shape.weight_shape)
    cpu_backend.conv.backward(dx, arrays["dy"], arrays["w"], shape, dx=dx, dw=dw)
    assert_close(dx, run(REFERENCE, "backward_data", arrays, shape), 1e-12)
    assert_close(dw, run(REFERENCE, "backward_filter", arrays, shape), 1e-12)
