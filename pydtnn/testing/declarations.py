"""Checks of a layer's declarations: arrays that it saves, creates, passes on and overwrites."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydtnn.kernels.reference.family import Array
from pydtnn.testing.case import Case


def check_saves(case: Case) -> None:
    """Check `saves` against the arrays that are referenced after forward."""
    xs = tuple(x.copy() for x in case.xs)
    y, residuals = case.forward(xs)
    shared = any(_owner(y) is _owner(x) for x in xs)
    references = {
        "input": [weakref.ref(_owner(x)) for x in xs],
        "output": [weakref.ref(_owner(y))],
    }
    del xs, y  # now referenced only by `residuals`
    for what, refs in references.items():
        declares = what in case.layer.saves or (shared and case.layer.saves)
        if any(ref() is not None for ref in refs) and not declares:
            raise case.fail(
                f"its {what} is still referenced after forward, but `saves` is {case.layer.saves}"
            )
    del residuals


def check_new_output(case: Case) -> None:
    """Check `new_output`, and `views` of the output."""
    y, _ = case.forward(case.xs)
    if case.layer.new_output:
        for i, x in enumerate(case.xs):
            if _shares(case, y, x):
                raise case.fail(f"the output shares memory with input {i}, despite `new_output`")
    if "output" in case.layer.views and not _is_view(case, y, case.xs[0]):
        raise case.fail('the output is not a view of the input, despite "output" in `views`')


def check_new_gradient(case: Case) -> None:
    """Check `new_gradient`, and `views` of the gradient."""
    layer, dy = case.layer, case.dy.copy()
    y, saved = layer.forward(*case.xs, context=case.context(len(dy)))
    given = [*case.xs, y, dy, *_arrays(saved), *_parameters(case)]
    result: Any = layer.backward(dy, saved)
    dxs = result if isinstance(result, tuple) else (result,)
    for i, dx in enumerate(dxs):
        others = [*given, *dxs[:i]]
        if layer.new_gradient and any(_shares(case, dx, other) for other in others):
            raise case.fail(
                f"the gradient of input {i} shares memory with an argument or with another "
                "gradient, despite `new_gradient`"
            )
        if "gradient" in layer.views and not _is_view(case, dx, dy):
            raise case.fail('the gradient is not a view of dy, despite "gradient" in `views`')


def check_overwriting(case: Case) -> None:
    """Check that in-place computation, if declared, is used and does not change results."""
    layer, want = case.layer, case.run(case.xs, case.dy)
    for over_input in {False, layer.may_overwrite_input}:
        for over_dy in {False, layer.may_overwrite_dy}:
            xs, dy = tuple(x.copy() for x in case.xs), case.dy.copy()
            layer.overwrites_input, layer.overwrites_dy = over_input, over_dy
            try:
                y, residuals = case.forward(xs)
                kept = y.copy()  # backward must not overwrite y either
                got = case.backward(kept, dy, residuals)
            finally:
                layer.overwrites_input = layer.overwrites_dy = False
            places = [what for what, on in (("input", over_input), ("dy", over_dy)) if on]
            case.compare(got, want, f"when it may overwrite {' and '.join(places) or 'nothing'}")
            if over_input and not _is_view(case, y, xs[0]):
                raise case.fail("forward must overwrite its input if `overwrites_input` is set")
            if over_dy and not _is_view(case, got.dxs[0], dy):
                raise case.fail("backward must overwrite dy if `overwrites_dy` is set")


def _is_view(case: Case, a: Array, b: Array) -> bool:
    return a.size == b.size and _shares(case, a, b)


def _shares(case: Case, a: Array, b: Array) -> bool:
    return type(a) is type(b) and bool(case.backend.xp.shares_memory(a, b))


def _parameters(case: Case) -> Iterator[Array]:
    for p in case.layer.parameters:
        yield from (p.master, p.grad)


def _owner(array: Array) -> Array:
    """Return the array that owns the memory."""
    while isinstance(getattr(array, "base", None), type(array)):
        array = array.base
    return array


def _arrays(value: Any) -> Iterator[Array]:
    """Yield all arrays within nested containers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield value
    elif is_dataclass(value):
        yield from _arrays([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(item)
