"""Checks of the values that a layer computes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer
from pydtnn.model import Model
from pydtnn.tools.testing.case import REPEATED, LayerCase, Pass

STEP = 1e-5
"""Step of central differences: truncation and rounding errors are both near 1e-10."""

DIFFERENCES = 1e-6
"""Tolerance of gradients against differences, which allows derivatives much larger than 1."""

SINGLE = 1e-4
"""Tolerance of float32 against float64: its rounding error, 6e-8, times a thousand operations."""

HALF = 0.03
"""Tolerance of bfloat16 against float64: its rounding error, 2e-3, times a few roundings."""

ENTRIES = 40
"""Entries of each array that are perturbed one by one, in training and with the first seed; random
directions perturb all of them."""


def check_output(case: LayerCase) -> None:
    """Check that nothing is overwritten; the model checks the shapes."""
    xs, dy = tuple(x.copy() for x in case.xs), case.dy.copy()
    values = {name: p.master.copy() for name, p in case.model.parameters.items()}
    y, residuals = case.forward(xs)
    case.backward(y, dy, residuals)
    for i, (x, before) in enumerate(zip(xs, case.xs, strict=True)):
        if not (x == before).all():
            raise case.fail(f"input {i} is overwritten, although `overwrites_input` is not set")
    if not (dy == case.dy).all():
        raise case.fail("dy is overwritten, although `overwrites_dy` is not set")
    for name, p in case.model.parameters.items():
        if not (p.master == values[name]).all():
            raise case.fail(f"the value of {name} is changed")


def check_repeatable(case: LayerCase) -> None:
    """Check that a second pass over the same batch has the same results."""
    once, again = (case.run(case.xs, case.dy) for _ in range(2))
    for (what, first), (_, second) in zip(once.named(), again.named(), strict=True):
        a, b = case.backend.to_numpy(first), case.backend.to_numpy(second)
        if a.shape != b.shape or not np.allclose(a, b, REPEATED, REPEATED, equal_nan=True):
            raise case.fail(
                f"{'forward' if first is once.y else 'backward'} is not repeatable: {what} of the "
                "same batch is another one the second time; random numbers must be a function of "
                "`context.seed`, `context.epoch` and `context.samples`, as those of Dropout"
            )


def check_gradients(case: LayerCase) -> None:
    """Check backward against central differences of ``sum(y dy)``."""
    got = case.run(case.xs, case.dy)
    arrays = [*case.xs, *(p.master for p in case.model.parameters.values())]
    for (what, slope), array in zip(list(got.named())[1:], arrays, strict=True):
        if tuple(slope.shape) != tuple(array.shape):
            raise case.fail(f"{what} must have shape {array.shape}, got {slope.shape}")
        slope = case.backend.to_numpy(slope)
        if slope.size and not slope.any():
            case.dead.add(what)
        tolerance = DIFFERENCES * max(abs(slope).max(), 1e-3)
        for flat in case.rng.permutation(prod(slope.shape))[: case.entries]:
            direction = np.zeros(slope.shape)
            direction.flat[flat] = 1
            where = tuple(map(int, np.unravel_index(flat, slope.shape)))
            _compare(case, f"{what} at {where}", slope, array, direction, tolerance)
        direction = case.rng.normal(size=slope.shape)
        # errors of the entries add up like a random walk
        tolerance *= slope.size**0.5
        _compare(case, f"{what} in a random direction", slope, array, direction, tolerance)


def _compare(
    case: LayerCase,
    what: str,
    slope: np.ndarray,
    array: Array,
    direction: np.ndarray,
    tolerance: float,
) -> None:
    expected = float((slope * direction).sum())
    step = case.backend.asarray(STEP * direction)
    measured = derivative(lambda: float((case.forward(case.xs)[0] * case.dy).sum()), array, step)
    if not abs(expected - measured) <= tolerance:
        raise case.fail(
            f"{what} is wrong: central differences give {measured:.8g}, got {expected:.8g} from "
            f"backward (tolerance {tolerance:.0e})"
        )


def derivative(loss: Callable[[], float], array: Array, step: Array) -> float:
    """Return the central difference of a loss for a step of `STEP` along an array."""
    before, losses = array.copy(), []
    for moved in (before + step, before - step):
        array[...] = moved
        losses.append(loss())
    array[...] = before
    return (losses[0] - losses[1]) / (2 * STEP)


def check_in_flight(case: LayerCase) -> None:
    """Check that forward a, forward b, backward a, backward b agrees with separate passes."""
    batches = [(case.xs, case.dy), case.draw(len(case.dy))]
    alone = [case.run(xs, dy) for xs, dy in batches]
    passes = [case.forward(xs) for xs, _ in batches]
    for (y, residuals), (_, dy), want in zip(passes, batches, alone, strict=True):
        got = case.backward(y, dy.copy(), residuals)
        case.compare(got, want, "with two batches in flight; keep what backward needs in `saved`")


def check_accumulation(case: LayerCase) -> None:
    """Check that ``accumulate=True`` adds to the parameters' gradients."""
    once = case.run(case.xs, case.dy)
    y, residuals = case.forward(case.xs)
    got = case.backward(y, case.dy.copy(), residuals, accumulate=True)
    twice = Pass(once.y, once.dxs, {name: 2 * grad for name, grad in once.grads.items()})
    case.compare(got, twice, "with accumulate=True; add to `grad` then, as `store_grad` does")


def check_halves(case: LayerCase) -> None:
    """Check the halves of backward, if a layer has them: added up, they are backward."""
    layer, model = case.layer, case.model
    if type(layer).backward_inputs is Layer.backward_inputs:
        return
    once = case.run(case.xs, case.dy)
    y, residuals = case.forward(case.xs)
    (dx,) = model.backward_shards([case.dy.copy()], [residuals], accumulate=True, inputs_only=True)
    dxs = dx if isinstance(dx, tuple) else (dx,)
    own = tuple(one.copy() for one in dxs)
    for one in dxs if "gradient" in layer.new_results else ():
        one[...] = np.nan  # the layer before may overwrite it
    model.backward_parameters(residuals, accumulate=True)
    grads = {name: p.grad.copy() for name, p in model.parameters.items()}
    twice = Pass(y, once.dxs, {name: 2 * grad for name, grad in once.grads.items()})
    case.compare(Pass(y, own, grads), twice, "in two halves; add it to `grad` in one of them")


def check_unneeded_gradient(case: LayerCase) -> None:
    """Check that gradients of parameters are the same if dx is not needed."""
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


def check_empty_batch(case: LayerCase) -> None:
    """Check that a batch of no samples gives empty arrays and gradients of zero."""
    got = case.run(*case.draw(0))
    zeros = {name: 0 * p.master for name, p in case.model.parameters.items()}
    want = Pass(
        case.backend.zeros((0, *case.layer.output_shape), "float64"),
        tuple(case.backend.zeros((0, *shape), "float64") for shape in case.shapes),
        zeros,
    )
    case.compare(got, want, "for a batch of no samples")


def check_float32(case: LayerCase) -> None:
    """Check that a float32 model computes in float32 and agrees within its precision."""
    _check_narrow(case, "float32", SINGLE)


def check_16_bits(case: LayerCase) -> None:
    """Check that a bfloat16 model agrees within its precision."""
    _check_narrow(case, "bfloat16", HALF)


def _check_narrow(case: LayerCase, dtype: str, tolerance: float) -> None:
    model = _alike(case, dtype)
    xs, dy = tuple(x.astype(model.dtype) for x in case.xs), case.dy.astype(model.dtype)
    _check_types(case, model, xs, dy)
    want = case.run(tuple(x.astype("float64") for x in xs), dy.astype("float64"))
    case.compare(case.run(xs, dy, model), want, f"in {dtype}", tolerance)


def _check_types(case: LayerCase, model: Model, xs: tuple[Array, ...], dy: Array) -> None:
    """Check the dtype of results: that of the arguments, float32 without support of "16 bits"."""
    layer = model.layers[0]
    given = [layer.accept(x.copy()) for x in xs]
    y, saved = layer.forward(*given, context=case.context(len(dy)))
    dx = layer.backward(layer.accept(dy.copy()), saved)
    for what, array in zip(("forward", "backward"), (y, dx), strict=True):
        for result in array if isinstance(array, tuple) else (array,):
            if result.dtype != layer.dtype:
                raise case.fail(f"{what} returns {result.dtype} in a {model.dtype} model")


def _alike(case: LayerCase, dtype: str) -> Model:
    """Create a model of another dtype, and round the case's parameters in the same way."""
    model, parameters = case.build(dtype), case.model.parameters
    for name, p in model.parameters.items():
        p.master[...] = parameters[name].value
    model.refresh()
    for name, p in model.parameters.items():
        parameters[name].master[...] = p.value
    return model
