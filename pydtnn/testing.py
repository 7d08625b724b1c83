"""Check that a layer keeps its contract: for the library's layers and for one's own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, Shape, StepContext
from pydtnn.model import Model

STEP = 1e-5
"""Of central differences: truncation and rounding errors are both near 1e-10 then."""

DIFFERENCES = 1e-6
"""Tolerance of gradients against differences; room for functions steeper than 1."""

REPEATED = 1e-12
"""Tolerance of the same sums in float64, where only their order may differ."""

SINGLE = 1e-4
"""Tolerance of float32 against float64: its rounding error, 6e-8, times some hundred operations."""

ENTRIES = 40
"""Entries of each array whose derivative is taken one by one; the rest is checked in random directions."""


def check_layer(
    layer: Layer,
    *input_shapes: Shape,
    backend: Backend | str = "numpy",
    batch: int = 3,
    positive: bool = False,
    seed: int = 0,
) -> None:
    """Check that a layer keeps its contract, in training and in evaluation.

    That its output has the shape that `build` says; that its gradients (of inputs and parameters)
    are those of central differences in float64; that two forward passes can be in flight; that
    gradients accumulate; that it leaves alone what it may not overwrite; that `saves`, `saved_bytes`,
    `new_output`, `new_gradient`, `views`, `may_overwrite_input` and `may_overwrite_dy` are true; that a
    batch may be empty; that float32 agrees with float64.

    Parameters
    ----------
    layer : Layer
        Not yet part of a model; it is copied, so it can be used afterwards.
    *input_shapes : tuple of int
        Shape of one sample of each input, without the batch axis.
    backend : Backend or str
    batch : int
        Samples.
    positive : bool
        Whether inputs must be positive (they are then at least 0.5), as for a logarithm.
    seed : int
        Of the random inputs.

    Raises
    ------
    AssertionError
        In one sentence: the layer, what is wrong, and by how much.

    Examples
    --------
    >>> from pydtnn.layers import Conv2d
    >>> check_layer(Conv2d(4, 3, stride=2, padding="same"), (5, 6, 2))
    """
    backend = create_backend(backend) if isinstance(backend, str) else backend
    for training in (True, False):
        case = _Case(layer, input_shapes, backend, batch, positive, seed, training)
        _check_output(case)
        _check_gradients(case)
        _check_in_flight(case)
        _check_accumulation(case)
        _check_unneeded_gradient(case)
        _check_saves(case)
        _check_new_arrays(case)
        _check_overwriting(case)
        _check_empty_batch(case)
        _check_float32(case)


@dataclass
class _Pass:
    """What one forward and backward pass gave."""

    y: Array
    dxs: tuple[Array, ...]
    grads: dict[str, Array]

    def named(self) -> Iterator[tuple[str, Array]]:
        yield "the output", self.y
        for i, dx in enumerate(self.dxs):
            yield f"the gradient of input {i}", dx
        for name, grad in self.grads.items():
            yield f"the gradient of {name}", grad


class _Case:
    """A layer alone in a float64 model, with random inputs, parameters and dy."""

    def __init__(
        self,
        layer: Layer,
        shapes: tuple[Shape, ...],
        backend: Backend,
        batch: int,
        positive: bool,
        seed: int,
        training: bool,
    ) -> None:
        self.name = type(layer).__name__
        self.mode = "training" if training else "evaluation"
        self.template, self.shapes, self.backend = layer, shapes, backend
        self.positive = positive
        self.training = training
        self.rng = np.random.default_rng(seed)
        self.model = self.build("float64")
        self.layer = self.model.layers[0]
        for p in self.model.parameters.values():
            p.value += backend.asarray(0.1 * self.rng.normal(size=p.shape))
        self.xs, self.dy = self.draw(batch)

    def build(self, dtype: str) -> Model:
        layer = copy.deepcopy(self.template)
        return Model(layer, self.shapes, backend=self.backend, dtype=dtype, input_gradient=True)

    def draw(self, batch: int) -> tuple[tuple[Array, ...], Array]:
        """Random inputs and a random dy."""
        xs = [self.rng.normal(size=(batch, *shape)) for shape in self.shapes]
        if self.positive:
            xs = [abs(x) + 0.5 for x in xs]
        dy = self.rng.normal(size=(batch, *self.layer.output_shape))
        return tuple(map(self.backend.asarray, xs)), self.backend.asarray(dy)

    def context(self, batch: int) -> StepContext:
        return StepContext(training=self.training, samples=np.arange(batch))

    def forward(self, xs: tuple[Array, ...], model: Model | None = None) -> tuple[Array, list[Any]]:
        return (model or self.model).forward(xs, self.context(len(xs[0])))

    def backward(
        self, y: Array, dy: Array, residuals: list[Any], model: Model | None = None, **options: bool
    ) -> _Pass:
        model = model or self.model
        dx = model.backward(dy, residuals, **options)
        grads = {name: p.grad.copy() for name, p in model.parameters.items()}
        return _Pass(y, dx if isinstance(dx, tuple) else (dx,), grads)

    def run(self, xs: tuple[Array, ...], dy: Array, model: Model | None = None) -> _Pass:
        """One forward and backward pass on copies."""
        y, residuals = self.forward(tuple(x.copy() for x in xs), model)
        return self.backward(y, dy.copy(), residuals, model)

    def fail(self, sentence: str) -> AssertionError:
        return AssertionError(f"{self.name} ({self.mode}): {sentence}")

    def same(self, got: _Pass, want: _Pass, when: str, tolerance: float = REPEATED) -> None:
        """Compare two passes."""
        for (what, a), (_, b) in zip(got.named(), want.named(), strict=True):
            a, b = self.backend.to_numpy(a), self.backend.to_numpy(b)
            if a.shape != b.shape:
                raise self.fail(f"{what} has shape {a.shape} instead of {b.shape} {when}")
            error, where = _distance(a, b)
            if not error <= tolerance:
                raise self.fail(
                    f"{what} differs {when}: at {where} it is {a[where]:.6g} instead of "
                    f"{b[where]:.6g} (off by {error:.1e} of the largest, {tolerance:.0e} allowed)"
                )


def _distance(a: np.ndarray, b: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """Largest difference in units of the largest entry of `b`, and where it is."""
    if not a.size:
        return 0.0, ()
    difference = np.where(np.isfinite(a) & np.isfinite(b), abs(a - b), np.inf)
    where = tuple(map(int, np.unravel_index(difference.argmax(), a.shape)))
    return float(difference[where] / max(abs(b).max(), 1e-3)), where


def _check_output(case: _Case) -> None:
    xs, dy = tuple(x.copy() for x in case.xs), case.dy.copy()
    y, residuals = case.forward(xs)
    if tuple(y.shape) != (len(dy), *case.layer.output_shape):
        raise case.fail(
            f"forward gives shape {tuple(y.shape[1:])}, build says {case.layer.output_shape}"
        )
    values = {name: p.value.copy() for name, p in case.model.parameters.items()}
    case.backward(y, dy, residuals)
    for i, (x, before) in enumerate(zip(xs, case.xs, strict=True)):
        if not (x == before).all():
            raise case.fail(f"input {i} is overwritten where `overwrites_input` is not set")
    if not (dy == case.dy).all():
        raise case.fail("backward overwrites dy where `overwrites_dy` is not set")
    for name, p in case.model.parameters.items():
        if not (p.value == values[name]).all():
            raise case.fail(f"the value of {name} is changed")


def _check_gradients(case: _Case) -> None:
    got = case.run(case.xs, case.dy)
    arrays = [*case.xs, *(p.value for p in case.model.parameters.values())]
    slopes = [*got.dxs, *got.grads.values()]
    names = [what for what, _ in got.named()][1:]
    for what, array, slope in zip(names, arrays, slopes, strict=True):
        if tuple(slope.shape) != tuple(array.shape):
            raise case.fail(f"{what} has shape {slope.shape} instead of {array.shape}")
        slope = case.backend.to_numpy(slope)
        scale = max(abs(slope).max(), 1e-3)
        for where in _sample(case.rng, slope.shape):
            direction = np.zeros(slope.shape)
            direction[where] = 1
            measured = _derivative(case, array, direction)
            if not abs(slope[where] - measured) <= DIFFERENCES * scale:
                raise case.fail(
                    f"{what} is wrong: at {where} backward says {slope[where]:.6g}, "
                    f"central differences say {measured:.6g}"
                )
        for _ in range(3):
            direction = case.rng.normal(size=slope.shape)
            measured, expected = _derivative(case, array, direction), (slope * direction).sum()
            if not abs(expected - measured) <= DIFFERENCES * scale * slope.size**0.5:
                raise case.fail(
                    f"{what} is wrong: in a random direction backward says {expected:.6g}, "
                    f"central differences say {measured:.6g}"
                )


def _sample(rng: np.random.Generator, shape: Shape) -> list[tuple[int, ...]]:
    flat = rng.permutation(prod(shape))[:ENTRIES]
    return [tuple(map(int, np.unravel_index(i, shape))) for i in flat]


def _derivative(case: _Case, array: Array, direction: np.ndarray) -> float:
    """Derivative of ``sum(y dy)`` as `array`, an input or a parameter, moves in a direction."""
    before = array.copy()
    losses = []
    for sign in (1, -1):
        array[...] = before + case.backend.asarray(sign * STEP * direction)
        y, _ = case.forward(case.xs)
        losses.append(float((y * case.dy).sum()))
    array[...] = before
    return (losses[0] - losses[1]) / (2 * STEP)


def _check_in_flight(case: _Case) -> None:
    batches = [(case.xs, case.dy), case.draw(len(case.dy) + 1)]
    alone = [case.run(xs, dy) for xs, dy in batches]
    passes = [case.forward(xs) for xs, _ in batches]
    for (y, residuals), (_, dy), want in zip(passes, batches, alone, strict=True):
        got = case.backward(y, dy.copy(), residuals)
        case.same(got, want, "with two batches in flight; keep in `saved` what backward needs")


def _check_accumulation(case: _Case) -> None:
    first = case.run(case.xs, case.dy)
    y, residuals = case.forward(case.xs)
    got = case.backward(y, case.dy.copy(), residuals, accumulate=True)
    twice = _Pass(first.y, first.dxs, {name: 2 * grad for name, grad in first.grads.items()})
    case.same(got, twice, "with accumulate=True; add to `grad`, as `store_grad` does")


def _check_unneeded_gradient(case: _Case) -> None:
    want = case.run(case.xs, case.dy)
    y, residuals = case.forward(case.xs)
    case.layer.needs_dx = False
    try:
        got = case.backward(y, case.dy.copy(), residuals)
    finally:
        case.layer.needs_dx = True
    case.same(_Pass(got.y, (), got.grads), _Pass(want.y, (), want.grads), "without `needs_dx`")


def _check_saves(case: _Case) -> None:
    xs = tuple(x.copy() for x in case.xs)
    y, residuals = case.forward(xs)
    others = [*xs, y, case.layer.parameters, case.context(len(y)).samples]
    held = [_owner(a) for a in _arrays(residuals)]
    own = {id(a): a.nbytes for a in held if not any(a is _owner(b) for b in _arrays(others))}
    declared, extra = case.layer.saved_bytes(len(y)), sum(own.values()) - _small(own)
    if extra > declared:
        raise case.fail(
            f"`saved` holds {extra} bytes beyond input and output, `saved_bytes` says {declared}"
        )
    passed = {id(_owner(y))} & {id(_owner(x)) for x in xs}
    refs = {"input": [weakref.ref(_owner(x)) for x in xs], "output": [weakref.ref(_owner(y))]}
    del xs, y, others, held
    kept = {what for what in refs if any(ref() is not None for ref in refs[what])}
    if passed and kept & set(case.layer.saves):
        return
    for what in kept - set(case.layer.saves):
        raise case.fail(f"its {what} is kept alive after forward, but `saves` does not say so")


def _owner(array: Array) -> Array:
    """The array whose memory it is."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


def _arrays(value: Any) -> Iterator[Array]:
    """All arrays within nested containers."""
    if hasattr(value, "dtype") and hasattr(value, "nbytes"):
        yield value
    elif isinstance(value, Mapping):
        yield from _arrays(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif is_dataclass(value):
        yield from _arrays([getattr(value, field.name) for field in fields(value)])
