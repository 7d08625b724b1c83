"""Checks of what a layer computes."""

from __future__ import annotations

from math import prod

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.testing.case import Case, Pass

STEP = 1e-5
"""Of central differences: their truncation and rounding errors are both near 1e-10 then."""

DIFFERENCES = 1e-6
"""Tolerance of gradients against differences: leaves room for functions much steeper than 1."""

SINGLE = 1e-4
"""Tolerance of float32 against float64: its rounding error, 6e-8, times a thousand operations."""

ENTRIES = 40
"""Entries of each array that are moved one by one; random directions move all of them."""


def check_output(case: Case) -> None:
    """Check the output's shape, and that nothing is overwritten."""
    xs, dy = tuple(x.copy() for x in case.xs), case.dy.copy()
    values = {name: p.value.copy() for name, p in case.model.parameters.items()}
    y, residuals = case.forward(xs)
    if tuple(y.shape[1:]) != case.layer.output_shape or len(y) != len(dy):
        raise case.fail(
            f"forward gives an array of shape {tuple(y.shape)} for {len(dy)} samples, "
            f"build promises {case.layer.output_shape} for each"
        )
    case.backward(y, dy, residuals)
    for i, (x, before) in enumerate(zip(xs, case.xs, strict=True)):
        if not (x == before).all():
            raise case.fail(f"input {i} is overwritten, although `overwrites_input` is not set")
    if not (dy == case.dy).all():
        raise case.fail("dy is overwritten, although `overwrites_dy` is not set")
    for name, p in case.model.parameters.items():
        if not (p.value == values[name]).all():
            raise case.fail(f"the value of {name} is changed")


def check_gradients(case: Case) -> None:
    """Check backward against central differences of ``sum(y dy)``."""
    got = case.run(case.xs, case.dy)
    arrays = [*case.xs, *(p.value for p in case.model.parameters.values())]
    for (what, slope), array in zip(list(got.named())[1:], arrays, strict=True):
        if tuple(slope.shape) != tuple(array.shape):
            raise case.fail(f"{what} has shape {slope.shape} instead of {array.shape}")
        slope = case.backend.to_numpy(slope)
        tolerance = DIFFERENCES * max(abs(slope).max(), 1e-3)
        for flat in case.rng.permutation(prod(slope.shape))[:ENTRIES]:
            direction = np.zeros(slope.shape)
            direction.flat[flat] = 1
            where = tuple(map(int, np.unravel_index(flat, slope.shape)))
            _compare(case, f"{what} at {where}", slope, array, direction, tolerance)
        direction = case.rng.normal(size=slope.shape)
        # errors of the entries add up like a random walk
        tolerance *= slope.size**0.5
        _compare(case, f"{what} in a random direction", slope, array, direction, tolerance)


def _compare(
    case: Case, what: str, slope: np.ndarray, array: Array, direction: np.ndarray, tolerance: float
) -> None:
    expected = float((slope * direction).sum())
    measured = _derivative(case, array, direction)
    if not abs(expected - measured) <= tolerance:
        raise case.fail(
            f"{what} is wrong: backward says {expected:.8g}, central differences say "
            f"{measured:.8g}, and {tolerance:.0e} is allowed between them"
        )


def _derivative(case: Case, array: Array, direction: np.ndarray) -> float:
    before, step = array.copy(), case.backend.asarray(STEP * direction)
    losses = []
    for moved in (before + step, before - step):
        array[...] = moved
        y, _ = case.forward(case.xs)
        losses.append(float((y * case.dy).sum()))
    array[...] = before
    return (losses[0] - losses[1]) / (2 * STEP)


def check_in_flight(case: Case) -> None:
    """Check that forward a, forward b, backward a, backward b is what a and b give alone."""
    batches = [(case.xs, case.dy), case.draw(len(case.dy))]
    alone = [case.run(xs, dy) for xs, dy in batches]
    passes = [case.forward(xs) for xs, _ in batches]
    for (y, residuals), (_, dy), want in zip(passes, batches, alone, strict=True):
        got = case.backward(y, dy.copy(), residuals)
        case.compare(got, want, "with two batches in flight; keep what backward needs in `saved`")


def check_accumulation(case: Case) -> None:
    """Check that ``accumulate=True`` adds to the parameters' gradients."""
    once = case.run(case.xs, case.dy)
    y, residuals = case.forward(case.xs)
    got = case.backward(y, case.dy.copy(), residuals, accumulate=True)
    twice = Pass(once.y, once.dxs, {name: 2 * grad for name, grad in once.grads.items()})
    case.compare(got, twice, "with accumulate=True; add to `grad` then, as `store_grad` does")


def check_unneeded_gradient(case: Case) -> None:
    """Check that parameters get the same gradients where nobody needs dx."""
    want = case.run(case.xs, case.dy)
    y, residuals = case.forward(case.xs)
    case.layer.needs_dx = False
    try:
        got = case.backward(y, case.dy.copy(), residuals)
    finally:
        case.layer.needs_dx = True
    case.compare(
        Pass(got.y, (), got.grads), Pass(want.y, (), want.grads), "where `needs_dx` is not set"
    )


def check_empty_batch(case: Case) -> None:
    """Check that a batch of no samples gives empty arrays and gradients of zero."""
    got = case.run(*case.draw(0))
    zeros = {name: 0 * p.value for name, p in case.model.parameters.items()}
    want = Pass(
        case.backend.zeros((0, *case.layer.output_shape), "float64"),
        tuple(case.backend.zeros((0, *shape), "float64") for shape in case.shapes),
        zeros,
    )
    case.compare(got, want, "for a batch of no samples")


def check_float32(case: Case) -> None:
    """Check that a float32 model computes in float32, and the same within its precision."""
    single, double = case.build("float32"), case.model
    for name, p in single.parameters.items():
        p.value[...] = double.parameters[name].value
        double.parameters[name].value[...] = p.value
    xs, dy = tuple(x.astype("float32") for x in case.xs), case.dy.astype("float32")
    layer = single.layers[0]
    y, saved = layer.forward(*(x.copy() for x in xs), context=case.context(len(dy)))
    dx = layer.backward(dy.copy(), saved)
    for what, array in zip(("forward", "backward"), (y, dx), strict=True):
        for result in array if isinstance(array, tuple) else (array,):
            if result.dtype != dy.dtype:
                raise case.fail(f"{what} gives {result.dtype} in a float32 model")
    want = case.run(tuple(x.astype("float64") for x in xs), dy.astype("float64"))
    case.compare(case.run(xs, dy, single), want, "in float32", SINGLE)
