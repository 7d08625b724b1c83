"""A model with a single layer and random inputs, for all checks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, Shape, StepContext
from pydtnn.model import Model
from pydtnn.training.gradient_check import check_stored

REPEATED = 1e-12
"""Tolerance of a computation repeated in float64 with at most another order of sums."""


@dataclass
class Pass:
    """Results of one forward and backward pass."""

    y: Array
    dxs: tuple[Array, ...]
    grads: dict[str, Array]

    def named(self) -> Iterator[tuple[str, Array]]:
        """Yield each array with its description."""
        yield "the output", self.y
        for i, dx in enumerate(self.dxs):
            yield f"the gradient of input {i}", dx
        for name, grad in self.grads.items():
            yield f"the gradient of {name}", grad


def largest_error(got: np.ndarray, want: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """Return the largest difference, relative to the largest magnitude, and its place."""
    error = np.where(np.isfinite(got) & np.isfinite(want), abs(got - want), np.inf)
    where = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    return float(error[where]) / max(abs(want).max(), 1e-3), where


class LayerCase:
    """A float64 model with a single layer, random inputs, parameters and dy.

    Parameters
    ----------
    layer : Layer
        Copied.
    shapes : tuple of tuple of int
        Shape of one sample of each input.
    backend : Backend
    batch : int
        Samples.
    positive : bool
        Whether inputs are positive.
    seed : int
    training : bool

    Attributes
    ----------
    entries : int
        Entries of each array that are perturbed one by one.
    dead : set of str
        Gradients that were 0 throughout when they were compared with differences.
    """

    entries = 0

    def __init__(
        self,
        layer: Layer,
        shapes: tuple[Shape, ...],
        *,
        backend: Backend,
        batch: int,
        positive: bool,
        seed: int,
        training: bool,
    ) -> None:
        self.template = layer
        self.shapes = shapes
        self.backend = backend
        self.positive = positive
        self.training = training
        self.rng = np.random.default_rng(seed)
        self.model = self.build("float64")
        self.layer = self.model.layers[0]
        for p in self.model.parameters.values():
            p.master += backend.asarray(0.1 * self.rng.normal(size=p.shape))
        self.xs, self.dy = self.draw(batch)
        self.dead: set[str] = set()

    def build(self, dtype: str) -> Model:
        """Create a model with a copy of the layer."""
        if self.template.bound:
            kind = type(self.template).__name__
            raise ValueError(f"check_layer: expected a new {kind}, got one of a model")
        layer = copy.deepcopy(self.template)
        return Model(
            layer,
            self.shapes,
            backend=self.backend,
            dtype=dtype,
            input_gradient=True,
            fuse=False,
        )

    def draw(self, batch: int) -> tuple[tuple[Array, ...], Array]:
        """Draw inputs and a dy."""
        xs = [self.rng.normal(size=(batch, *shape)) for shape in self.shapes]
        if self.positive:
            xs = [abs(x) + 0.5 for x in xs]
        dy = self.rng.normal(size=(batch, *self.layer.output_shape))
        return tuple(map(self.backend.asarray, xs)), self.backend.asarray(dy)

    def context(self, batch: int) -> StepContext:
        """Return the context of a pass over samples 0, 1, 2..."""
        return StepContext(training=self.training, samples=np.arange(batch))

    def forward(self, xs: tuple[Array, ...], model: Model | None = None) -> tuple[Array, list[Any]]:
        """Run forward on these arrays, without copying."""
        try:
            return (model or self.model).forward(xs, self.context(len(xs[0])))
        except (TypeError, ValueError) as error:  # raised by the model for invalid results
            raise self.fail(str(error)) from error

    def backward(
        self,
        y: Array,
        dy: Array,
        residuals: list[Any],
        model: Model | None = None,
        *,
        accumulate: bool = False,
    ) -> Pass:
        """Run backward on this dy, without copying."""
        model = model or self.model
        try:
            ready = None if accumulate else check_stored(model)
            dx = model.backward(dy, residuals, on_ready=ready, accumulate=accumulate)
        except ValueError as error:  # gradients of a wrong shape, or not stored
            raise self.fail(str(error)) from error
        grads = {name: p.grad.copy() for name, p in model.parameters.items()}
        return Pass(y, dx if isinstance(dx, tuple) else (dx,), grads)

    def run(self, xs: tuple[Array, ...], dy: Array, model: Model | None = None) -> Pass:
        """Run forward and backward on copies."""
        y, residuals = self.forward(tuple(x.copy() for x in xs), model)
        return self.backward(y, dy.copy(), residuals, model)

    def fail(self, sentence: str) -> AssertionError:
        """Return the error of a failed check."""
        mode = "training" if self.training else "evaluation"
        return AssertionError(f"{type(self.layer).__name__} in {mode}: {sentence}")

    def compare(self, got: Pass, want: Pass, when: str, tolerance: float = REPEATED) -> None:
        """Check that two passes agree within `tolerance` of each array's largest entry."""
        for (what, a), (_, b) in zip(got.named(), want.named(), strict=True):
            a, b = self.backend.to_numpy(a), self.backend.to_numpy(b)
            if a.shape != b.shape:
                raise self.fail(f"{what} must have shape {b.shape} {when}, got {a.shape}")
            if not a.size:
                continue
            relative, where = largest_error(a, b)
            if not relative <= tolerance:
                raise self.fail(
                    f"{what} is wrong {when}: expected {b[where]:.6g} at {where}, got "
                    f"{a[where]:.6g}, a difference of {relative:.1e} of the largest entry "
                    f"(tolerance {tolerance:.0e})"
                )


def check_saves(case: LayerCase) -> None:
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


def check_new_output(case: LayerCase) -> None:
    """Check `new_results` and `views` of the output."""
    y, _ = case.forward(case.xs)
    if "output" in case.layer.new_results:
        for i, x in enumerate(case.xs):
            if _shares(case, y, x):
                raise case.fail(f"the output shares memory with input {i}, despite `new_results`")
    if "output" in case.layer.views and not _is_view(case, y, case.xs[0]):
        raise case.fail('the output is not a view of the input, despite "output" in `views`')


def check_new_gradient(case: LayerCase) -> None:
    """Check `new_results` and `views` of the gradient."""
    layer, dy = case.layer, case.dy.copy()
    y, saved = layer.forward(*case.xs, context=case.context(len(dy)))
    stored = (array for p in layer.parameters for array in (p.master, p.grad))
    given = [*case.xs, y, dy, *_arrays(saved), *stored]
    result: Any = layer.backward(dy, saved)
    dxs = result if isinstance(result, tuple) else (result,)
    for i, dx in enumerate(dxs):
        others = [*given, *dxs[:i]]
        if "gradient" in layer.new_results and any(_shares(case, dx, other) for other in others):
            raise case.fail(
                f"the gradient of input {i} shares memory with an argument or with another "
                "gradient, despite `new_results`"
            )
        if "gradient" in layer.views and not _is_view(case, dx, dy):
            raise case.fail('the gradient is not a view of dy, despite "gradient" in `views`')


def check_overwriting(case: LayerCase) -> None:
    """Check that in-place computation, if declared, is used and does not change results."""
    layer, want = case.layer, case.run(case.xs, case.dy)
    for over_input in {False, "input" in layer.may_overwrite}:
        for over_dy in {False, "dy" in layer.may_overwrite}:
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


def _is_view(case: LayerCase, a: Array, b: Array) -> bool:
    return a.size == b.size and _shares(case, a, b)


def _shares(case: LayerCase, a: Array, b: Array) -> bool:
    return type(a) is type(b) and bool(case.backend.xp.shares_memory(a, b))


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
