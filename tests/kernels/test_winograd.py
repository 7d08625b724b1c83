"""Winograd's convolutions: their error, and the sizes at which they walk in other ways.

`test_conv.py` and `test_conv_fused.py` run them on every geometry that they suit; here are the
geometries that those lack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, ConvGeometry, create_backend
from pydtnn.kernels.cpu.conv import candidates
from pydtnn.kernels.reference import Conv as Reference
from pydtnn.kernels.reference import Fused
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded
from tests.kernels.test_conv import (
    DIRECTIONS,
    TOLERANCE,
    Arrays,
    Once,
    all_directions,
    cast,
    directions,
    geometry,
    operands,
    run,
    seeded,
)
from tests.kernels.test_fused import cast as cast_deferred
from tests.kernels.test_fused import deferred

REFERENCE = Reference(np)
ALGORITHMS = ("winograd4", "winograd2")

SIZES = {
    "a map smaller than a tile": (5, geometry((1, 3), 16, 16, (3, 3), padding=1)),
    "one output": (3, geometry((3, 3), 5, 6, (3, 3))),
    "tiles of several images": (21, geometry((2, 2), 24, 40, (3, 3), padding=1)),
    "partial tiles on both sides": (3, geometry((7, 9), 32, 16, (3, 3), padding=1)),
    "padding on one side": (2, geometry((6, 7), 8, 16, (3, 3), padding=((2, 0), (0, 2)))),
    "outputs that see only zeros": (2, geometry((3, 4), 5, 16, (3, 3), padding=5)),
    "an output less in the last tiles": (2, geometry((3, 13), 8, 45, (3, 3), 1, ((2, 2), (3, 3)))),
    "slabs of a large image": (2, geometry((50, 70), 16, 24, (3, 3), padding=1)),
    "a row wider than a block": (1, geometry((6, 700), 16, 16, (3, 3), padding=1)),
    "ranges of inputs": (2, geometry((8, 9), 210, 120, (3, 3), padding=1)),
    "ranges of outputs": (3, geometry((5, 6), 67, 390, (3, 3), padding=1)),
    "ranges of both, and slabs": (1, geometry((33, 40), 180, 170, (3, 3), padding=1)),
}
STRIDED = {
    "phases of a map smaller than a tile": (5, geometry((2, 3), 16, 16, (3, 3), 2, 1)),
    "phases of one output": (3, geometry((3, 3), 5, 6, (3, 3), 2)),
    "phases of one pixel": (3, geometry((1, 1), 5, 6, (3, 3), 2, 1)),
    "phases of tiles of several images": (21, geometry((8, 8), 24, 40, (3, 3), 2, 1)),
    "phases, partial tiles": (3, geometry((19, 22), 32, 16, (3, 3), 2, 1)),
    "phases, padding on one side": (2, geometry((13, 15), 8, 16, (3, 3), 2, ((2, 0), (0, 1)))),
    "phases, even padding": (2, geometry((17, 16), 16, 20, (3, 3), 2, ((0, 1), (2, 2)))),
    "phases, outputs that see only zeros": (2, geometry((3, 4), 5, 16, (3, 3), 2, 5)),
    "phases of slabs": (2, geometry((50, 71), 16, 24, (3, 3), 2, 1)),
    "phases of a row wider than a block": (1, geometry((7, 700), 16, 16, (3, 3), 2, 1)),
    "phases, ranges of inputs": (2, geometry((16, 17), 210, 120, (3, 3), 2, 1)),
    "phases, ranges of outputs": (3, geometry((9, 11), 67, 390, (3, 3), 2, 1)),
    "phases, ranges of both, and slabs": (1, geometry((66, 75), 131, 170, (3, 3), 2, 1)),
    "phases, 20 channels": (2, geometry((15, 15), 20, 35, (3, 3), 2, 1)),
    "5 by 5": (3, geometry((19, 22), 19, 33, (5, 5), 2, 2)),
    "5 by 5, odd padding": (3, geometry((18, 21), 3, 16, (5, 5), 2, ((1, 2), (3, 0)))),
    "5 by 5, an output less": (2, geometry((4, 5), 38, 33, (5, 5), 2, ((3, 3), (1, 0)))),
    "7 by 7": (3, geometry((23, 30), 3, 64, (7, 7), 2, 3)),
    "7 by 7, even padding": (2, geometry((23, 18), 17, 20, (7, 7), 2, ((2, 2), (0, 4)))),
    "7 by 7, ranges of both": (2, geometry((26, 25), 90, 100, (7, 7), 2, 3)),
}
"""Convolutions of stride 2, whose phases are Winograd's."""

LINES = {
    "a row, one output": (3, geometry((1, 7), 5, 6, (1, 7))),
    "a row of one pixel": (3, geometry((1, 1), 5, 6, (1, 7), padding=((0, 0), (3, 3)))),
    "a column of one pixel": (3, geometry((1, 1), 9, 16, (7, 1), padding=((3, 3), (0, 0)))),
    "rows, partial tiles": (3, geometry((5, 13), 32, 16, (1, 7), padding=((0, 0), (3, 3)))),
    "columns, partial tiles": (3, geometry((13, 5), 16, 24, (7, 1), padding=((3, 3), (0, 0)))),
    "rows of 17, an output less": (2, geometry((4, 17), 19, 45, (1, 7), padding=((0, 0), (3, 3)))),
    "columns of 17, an output less": (
        2,
        geometry((17, 4), 45, 19, (7, 1), padding=((3, 3), (0, 0))),
    ),
    "rows, padding on one side": (2, geometry((3, 11), 8, 16, (1, 7), padding=((1, 0), (0, 6)))),
    "columns, padding on one side": (2, geometry((11, 3), 8, 16, (7, 1), padding=((5, 0), (0, 2)))),
    "lines of outputs that see only zeros": (2, geometry((3, 4), 5, 16, (1, 3), padding=6)),
    "rows of 3 taps": (3, geometry((8, 8), 17, 33, (1, 3), padding=((0, 0), (1, 1)))),
    "columns of 3 taps": (21, geometry((7, 3), 33, 17, (3, 1), padding=((1, 1), (0, 0)))),
    "rows of 5 taps": (3, geometry((3, 18), 17, 33, (1, 5), padding=((0, 0), (2, 2)))),
    "columns of 5 taps": (3, geometry((9, 2), 16, 16, (5, 1), padding=((4, 0), (0, 0)))),
    "rows, slabs": (1, geometry((40, 61), 16, 24, (1, 7), padding=((0, 0), (3, 3)))),
    "columns, slabs": (2, geometry((61, 40), 16, 24, (7, 1), padding=((3, 3), (0, 0)))),
    "rows, ranges of both": (1, geometry((3, 19), 220, 230, (1, 7), padding=((0, 0), (3, 3)))),
    "columns, ranges of both": (1, geometry((17, 3), 410, 390, (3, 1), padding=((1, 1), (0, 0)))),
}
"""Filters of one row or one column."""
PARTS = {
    "parts of a map smaller than a tile": (5, geometry((1, 3), 16, 16, (5, 5), padding=2)),
    "parts of one output": (3, geometry((5, 5), 5, 6, (5, 5))),
    "parts, partial tiles": (3, geometry((7, 18), 20, 35, (5, 5), padding=2)),
    "parts, padding on one side": (2, geometry((6, 7), 8, 16, (5, 5), padding=((4, 0), (0, 3)))),
    "parts of outputs that see only zeros": (2, geometry((3, 4), 5, 16, (5, 5), padding=9)),
    "parts of slabs": (2, geometry((50, 70), 16, 24, (5, 5), padding=2)),
    "parts, ranges of both": (1, geometry((9, 6), 140, 130, (5, 5), padding=2)),
}
"""Filters of 5x5, which are four parts of at most 3x3."""

CASES = SIZES | STRIDED | LINES | PARTS
EVERY = [(case, algorithm) for case in SIZES for algorithm in ALGORITHMS]
EVERY += [(case, "polyphase") for case in STRIDED]
EVERY += [(case, candidates(shape)[1]) for case, (_, shape) in (LINES | PARTS).items()]


def error(value: np.ndarray, exact: np.ndarray) -> float:
    """Error in norm, relative to what is exact."""
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


@pytest.mark.few(59)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_every_way_of_walking_agrees_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str, dtype: Any
) -> None:
    batch, shape = CASES[case]
    arrays, expected = once(all_directions, case, batch, shape, dtype)
    for direction in DIRECTIONS:
        value = run(cpu_backend.conv, direction, arrays, shape, algorithm=algorithm)
        assert_close(value, expected[direction], TOLERANCE[dtype])


KERNELS = [(3, 3), (5, 5), (1, 3), (3, 1), (1, 5), (5, 1), (1, 7), (7, 1)]


def random_sizes(kernels: list[tuple[int, int]], stride: int) -> list[tuple[Any, Arrays, Arrays]]:
    """Geometries, operands and what is expected of them."""
    rng, found = np.random.default_rng(0), []
    for _ in range(30):
        kernel = kernels[rng.integers(len(kernels))]
        size = tuple(map(int, rng.integers(1, 20, 2)))
        padding = tuple(
            (int(p), int(q))
            for k in kernel
            for p, q in rng.integers(k // 2, 4 if k == 3 else k + 1, (1, 2))
        )
        channels, filters = map(int, rng.integers(1, 70, 2))
        shape = ConvGeometry(size, kernel, (stride,) * 2, padding, (1, 1), channels, filters, 1)
        arrays = operands(rng, int(rng.integers(1, 6)), shape)
        found.append((shape, arrays, directions(arrays, shape)))
    return found


@pytest.mark.parametrize(
    ("kernels", "stride"), [*(([kernel], 1) for kernel in KERNELS), ([(3, 3), (5, 5), (7, 7)], 2)]
)
def test_random_sizes_agree_with_the_reference(
    cpu_backend: Backend, once: Once, kernels: list[tuple[int, int]], stride: int
) -> None:
    for shape, arrays, expected in once(random_sizes, tuple(kernels), stride):
        for algorithm in candidates(shape)[1:]:
            for direction in DIRECTIONS:
                value = run(cpu_backend.conv, direction, arrays, shape, algorithm=algorithm)
                assert_close(value, expected[direction], 1e-12)


@pytest.mark.parametrize(("size", "channels"), [(32, 16), (16, 32), (8, 64)])
def test_the_error_is_what_the_design_note_says(
    cpu_backend: Backend, rng: np.random.Generator, size: int, channels: int
) -> None:
    """In units of the direct algorithm's error: 2.1 to 2.5 and 0.7 to 0.8, here with a margin."""
    shape = geometry((size, size), channels, channels, (3, 3), padding=1)
    arrays = cast(operands(rng, 4096 // size**2, shape), np.float32)
    arrays["b"][...] = 0
    for direction in DIRECTIONS:
        exact = run(REFERENCE, direction, cast(arrays, np.float64), shape)
        direct, tile4, tile2 = (
            error(run(cpu_backend.conv, direction, arrays, shape, algorithm=name), exact)
            for name in ("direct", *ALGORITHMS)
        )
        assert direct < tile4 <= min(3 * direct, 1.2e-6)
        assert tile2 <= 1.1 * direct


SLABS = [e for e in EVERY if e[0].endswith("slabs") or e[0] == "slabs of a large image"]


@pytest.mark.parametrize(("case", "algorithm"), SLABS)
def test_a_store_is_written_once_though_its_values_are_read_several_times(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, shape = CASES[case]
    w = operands(rng, batch, shape)["w"]
    x = deferred(rng, (batch, *shape.size, shape.channels))
    values = Fused(np).values(x)
    expected = np.empty((batch, *shape.output, shape.filters))
    REFERENCE.forward(values, w, None, shape, out=expected)
    for store in (guarded(np.full(x.shape, np.nan)), x.terms[0].x):
        out = guarded(np.full(expected.shape, np.nan))
        cpu_backend.conv.forward(x, w, None, shape, out=out, store=store, algorithm=algorithm)
        assert_guards_hold(out)
        assert_guards_hold(store)
        assert_close(out, expected, 1e-12)
        assert_close(store, values, 1e-14)


def sinks(conv: Reference, x: Any, w: Any, dy: Any, add: Any, shape: Any, **options: Any) -> Any:
    """All that a convolution makes of deferred arrays and in passing."""
    y, dx, dw = np.empty(dy.shape), add.copy(), np.empty(w.shape)
    moments, sums = np.empty(1 + 2 * shape.filters), np.empty((3, shape.channels))
    conv.forward(x, w, None, shape, out=y, relu=True, sums=moments, **options)
    conv.backward_data(dy, w, shape, out=dx, add=dx, gate=x, sums=sums, **options)
    conv.backward_filter(x, dy, shape, out=dw, **options)
    return y, dx, dw, moments, sums


def deferred_case(case: str) -> tuple[Any, Any]:
    """Deferred operands, and what is expected of them."""
    rng, (batch, shape) = seeded(case), CASES[case]
    w = operands(rng, batch, shape)["w"]
    x = deferred(rng, (batch, *shape.size, shape.channels), terms=2)
    dy = deferred(rng, (batch, *shape.output, shape.filters), relu=False)
    arrays = x, w, dy, rng.standard_normal(x.shape)
    return arrays, sinks(REFERENCE, *arrays, shape)


@pytest.mark.few(30)
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_deferred_arrays_and_sinks_agree_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str
) -> None:
    arrays, expected = once(deferred_case, case)
    values = sinks(cpu_backend.conv, *arrays, CASES[case][1], algorithm=algorithm)
    for value, exact in zip(values, expected, strict=True):
        assert_close(value, exact, 1e-11)


@pytest.mark.few(30)
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_the_number_of_threads_does_not_change_a_byte(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, shape = CASES[case]
    w = operands(rng, batch, shape)["w"].astype(np.float32)
    x = cast_deferred(deferred(rng, (batch, *shape.size, shape.channels)), np.float32)
    dy = operands(rng, batch, shape)["dy"].astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        conv = create_backend("cpu", threads=threads, isa=cpu_backend.isa).conv
        y, dx, dw = (np.empty(s, np.float32) for s in (dy.shape, x.shape, w.shape))
        moments, sums = np.empty(1 + 2 * shape.filters), np.empty((2, shape.channels))
        conv.forward(x, w, None, shape, out=y, sums=moments, algorithm=algorithm)
        conv.backward_data(dy, w, shape, out=dx, gate=x, sums=sums, algorithm=algorithm)
        conv.backward_filter(x, dy, shape, out=dw, algorithm=algorithm)
        results.append([a.tobytes() for a in (y, dx, dw, moments, sums)])
    assert results[0] == results[1] == results[2]


@pytest.mark.few(30)
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_both_gradients_at_once_are_those_of_each_alone(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, shape = CASES[case]
    w = operands(rng, batch, shape)["w"].astype(np.float32)
    x = deferred(rng, (batch, *shape.size, shape.channels), np.float32)
    dy = deferred(rng, (batch, *shape.output, shape.filters), np.float32, terms=2, relu=False)
    for threads in (1, 2):
        conv = create_backend("cpu", threads=threads, isa=cpu_backend.isa).conv
        alone, at_once = ([np.empty(a.shape, np.float32) for a in (x, w)] for _ in range(2))
        conv.backward_data(dy, w, shape, out=alone[0], gate=x, algorithm=algorithm)
        conv.backward_filter(x, dy, shape, out=alone[1], algorithm=algorithm)
        dx, dw = at_once
        conv.backward(x, dy, w, shape, dx=dx, dw=dw, gate=x, algorithm=algorithm)
        assert [a.tobytes() for a in at_once] == [a.tobytes() for a in alone]


PARTIAL = [e for e in EVERY if "partial" in e[0] or "7 by 7" in e[0]]


@pytest.mark.parametrize(("case", "algorithm"), [*SLABS, *PARTIAL])
def test_gradients_of_filters_are_added_if_asked(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, shape = CASES[case]
    arrays = operands(rng, batch, shape)
    before = rng.standard_normal(shape.weight_shape)
    options: dict[str, Any] = {"accumulate": True}
    expected, out = before.copy(), guarded(before)
    REFERENCE.backward_filter(arrays["x"], arrays["dy"], shape, out=expected, **options)
    cpu_backend.conv.backward_filter(
        arrays["x"], arrays["dy"], shape, out=out, algorithm=algorithm, **options
    )
    assert_guards_hold(out)
    assert_close(out, expected, 1e-12)


@pytest.mark.parametrize(("kernel", "channels"), [(3, 16), (3, 64), (5, 32), (7, 3)])
def test_the_error_of_phases_is_that_of_tiles_of_four(
    cpu_backend: Backend, rng: np.random.Generator, kernel: int, channels: int
) -> None:
    shape = geometry((32, 32), channels, 64, (kernel, kernel), 2, kernel // 2)
    arrays = cast(operands(rng, 4, shape), np.float32)
    arrays["b"][...] = 0
    for direction in DIRECTIONS:
        exact = run(REFERENCE, direction, cast(arrays, np.float64), shape)
        direct, phases = (
            error(run(cpu_backend.conv, direction, arrays, shape, algorithm=name), exact)
            for name in ("direct", "polyphase")
        )
        assert direct < phases <= min(4 * direct, 1.2e-6)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_the_error_of_lines_and_of_parts_is_about_that_of_tiles_of_four(
    cpu_backend: Backend, rng: np.random.Generator, kernel: tuple[int, int]
) -> None:
    """In units of the direct algorithm's error: 1.7 for F(4, 3), 2.7 for F(5, 4), 2.2 for 5x5."""
    shape = geometry((20, 20), 64, 32, kernel, padding=tuple((k // 2,) * 2 for k in kernel))
    arrays = cast(operands(rng, 4, shape), np.float32)
    arrays["b"][...] = 0
    for direction in DIRECTIONS:
        exact = run(REFERENCE, direction, cast(arrays, np.float64), shape)
        direct, own = (
            error(run(cpu_backend.conv, direction, arrays, shape, algorithm=name), exact)
            for name in candidates(shape)
        )
        assert own <= (3.2 if 7 in kernel else 2.6 if kernel == (5, 5) else 2) * direct


@pytest.mark.parametrize("kernel", [(1, 7), (5, 5)])
@pytest.mark.parametrize("change", [{"stride": 3}, {"groups": 2}, {"dilation": 2}])
def test_other_strides_groups_and_dilations_are_direct(
    cpu_backend: Backend, kernel: tuple[int, int], change: dict[str, int]
) -> None:
    shape = geometry((9, 9), 4, 4, kernel, padding=4, **change)
    assert candidates(shape) == ("direct",)
    x, w, y = (np.zeros(s) for s in ((1, 9, 9, 4), shape.weight_shape, (1, *shape.output, 4)))
    with pytest.raises(ValueError, match="expected one of direct for .*, got winograd4"):
        cpu_backend.conv.forward(x, w, None, shape, out=y, algorithm="winograd4")


def test_an_outlier_costs_only_large_tiles_digits_of_outputs_that_do_not_read_it(
    cpu_backend: Backend,
) -> None:
    """What docs/performance.md says of F(4x4), of direct algorithms and of F(2x2)."""
    place = geometry((16, 16), 16, 16, (3, 3), padding=1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 16, 16, 16)).astype(np.float32)
    w = (rng.normal(size=(16, 3, 3, 16)) / 12).astype(np.float32)
    errors, reaches = {}, {}
    for value in (1e4, np.inf):
        x[0, 7, 6, 3] = value
        exact = np.empty((1, 16, 16, 16))
        with np.errstate(invalid="ignore"):
            REFERENCE.forward(x.astype(float), w.astype(float), None, place, out=exact)
        others = np.ones((16, 16), bool)
        others[6:9, 5:8] = False
        size = np.sqrt((exact[0, others] ** 2).mean())
        for algorithm in ("direct", "winograd2", "winograd4"):
            y = np.empty(exact.shape, np.float32)
            cpu_backend.conv.forward(x, w, None, place, out=y, algorithm=algorithm)
            if value == np.inf:
                reaches[algorithm] = (~np.isfinite(y)).any(axis=-1).sum()
            else:
                errors[algorithm] = np.abs(y - exact)[0, others].max() / size
    assert errors["direct"] < 1e-5
    assert errors["winograd2"] < 1e-5
    assert 1e-4 < errors["winograd4"] < 5e-3
    assert reaches["direct"] == 9
    assert 9 < reaches["winograd4"] <= 25
