"""Number formats of fewer bits for what a training step stores, emulated in float32.

Products are computed in float32 from rounded factors. The gradient of rounding is taken to be 1
(the straight-through estimator of Bengio, Leonard and Courville, "Estimating or Propagating
Gradients Through Stochastic Neurons", 2013).

References
----------
Micikevicius et al., "FP8 Formats for Deep Learning", 2022; Rouhani et al., "Microscaling Data
Formats for Deep Learning", 2023.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from pydtnn.kernels import Deferred
from pydtnn.kernels.number_format import Rounding
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import Noise, bits, stream
from pydtnn.layers.base import Layer, StepContext
from pydtnn.layers.node import Node
from pydtnn.layers.recomputed import Recomputed, Value
from pydtnn.model.execution import deliver
from pydtnn.model.halves import in_halves
from pydtnn.model.passes import Hook, Pass, Run
from pydtnn.utils.names import select

RECIPES = {
    "mxfp4": "activations=e2m1:32,weights=e2m1:32,gradients=e2m1:32:stochastic,"
    "products=hadamard,float32=first+last",
    "nvfp4": "activations=e2m1:16:e4m3fn,weights=e2m1:16x16:e4m3fn,"
    "gradients=e2m1:16:e4m3fn:stochastic,products=hadamard,float32=first+last",
}
"""Formats by name, of which parts may be given differently."""

APART, HADAMARD = "apart", "hadamard"
"""What `Formats.products` may be."""


@dataclass(frozen=True)
class Formats:
    """Formats by what is rounded to them; None: float32.

    Parameters
    ----------
    activations : Rounding, optional
        Inputs of layers that multiply by a matrix (linear layers and convolutions), also as they
        are kept for the gradient of that matrix. Inputs of other layers are float32.
    weights : Rounding, optional
        Those matrices; their master values, which the optimizer updates, are float32. Not
        `stochastic`, as errors of a copy do not accumulate.
    gradients : Rounding, optional
        The gradients of the outputs of those layers, as their backward pass receives them.
    optimizer : Rounding, optional
        The state of the optimizer, after each update.
    products : str, optional
        "apart": each of a layer's three products rounds its own factors, in blocks along the axis
        that it sums over, as matrix units with scales of blocks require. For the gradient of the
        matrix, these are rows of activations and gradients (samples and positions), and the
        gradients have random words of their own. "hadamard": these rows are also multiplied, each
        16 of them, by a Hadamard matrix with random signs before they are rounded; rows that are
        fewer than 16 are not. By default, the factors are rounded once.
    float32 : tuple of str
        Layers of which nothing is rounded: "first", "last4" in the order in which they run, or
        names with wildcards, also of blocks.

    Raises
    ------
    ValueError

    References
    ----------
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, arXiv 2509.25149.
    """

    activations: Rounding | None = None
    weights: Rounding | None = None
    gradients: Rounding | None = None
    optimizer: Rounding | None = None
    products: str | None = None
    float32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights.stochastic:
            raise ValueError(
                "formats: weights are copies of float32 values, whose errors do not accumulate; "
                "round them to nearest, without stochastic"
            )
        if self.products not in (None, APART, HADAMARD):
            raise ValueError(
                f"formats: products are {APART} or {HADAMARD}, or not given, got {self.products!r}"
            )

    @classmethod
    def parse(cls, text: str) -> Formats:
        """Return what a text such as "activations=e4m3fn,gradients=e5m2,weights=e2m1:32" describes.

        Each part is a use and its `Rounding.parse`, "products=" or "float32=" with names joined by
        "+". A name of `RECIPES` may come first; later parts replace its own.

        Raises
        ------
        ValueError
        """
        known, items = [field.name for field in fields(cls)], text.split(",")
        given: dict[str, Any] = {}
        if recipe := RECIPES.get(items[0].strip()):
            given, items = {**vars(cls.parse(recipe))}, items[1:]
        uses = [item.partition("=")[0].strip() for item in items]
        for item, use in zip(items, uses, strict=True):
            form = item.partition("=")[2].strip()
            if use not in known or uses.count(use) > 1:
                raise ValueError(
                    f"formats: expected each of {', '.join(known)} at most once, with a format, "
                    f"such as activations=e4m3fn,weights=e2m1:32, or {' or '.join(RECIPES)} first, "
                    f"got {text!r}; for messages, use a compressor such as int8"
                )
            try:
                if use == "float32":
                    given[use] = tuple(filter(None, form.split("+")))
                elif form in ("float32", "once"):  # instead of what a recipe has
                    given[use] = None
                else:
                    given[use] = form if use == "products" else Rounding.parse(form)
            except ValueError as error:
                raise ValueError(f"formats: {use}: {error}") from None
        return cls(**given)

    def layers_in_float32(self, names: Sequence[str]) -> set[str]:
        """Return which of the layers with a matrix, in the order they run, are not rounded.

        Raises
        ------
        ValueError
            If there is no such layer.
        """
        found = set[str]()
        for word in self.float32:
            if place := re.fullmatch(r"(first|last)(\d*)", word):
                ordered = names if place[1] == "first" else names[::-1]
                found.update(ordered[: int(place[2] or 1)])
            else:
                found.update(select("formats: float32", [word], names))
        return found


def read_formats(given: Formats | str | None, dtype: Any, device: str) -> Formats | None:
    """Return the formats of a model of this dtype on a device.

    Raises
    ------
    ValueError
        If the text is invalid, the dtype is not float32, or a GPU would need random words.
    """
    if given is None:
        return None
    if np.dtype(dtype) != np.float32:
        raise ValueError(f"Model: formats require dtype float32, got {dtype}; omit one of them")
    formats = Formats.parse(given) if isinstance(given, str) else given
    random = any(isinstance(r, Rounding) and r.stochastic for r in vars(formats).values())
    if random and device == "cuda":
        raise ValueError("Model: stochastic formats require the device cpu or numpy, got cuda")
    return formats


def multiplies(layer: Layer) -> bool:
    """Return whether a layer multiplies its input by a matrix, which is rounded."""
    return any(p.working for p in layer.parameters)


@cache
def signs(seed: int) -> np.ndarray:
    """Return the random signs of the 16 rows of a Hadamard matrix, the same for all layers."""
    words = bits(seed, stream(HADAMARD), 0, np.zeros(1, "int64"), 16)[0]
    return np.where(words & 1, -1, 1).astype("float32")


class Rounder(Hook):
    """Rounds the inputs and gradients of the layers of a graph.

    Parameters
    ----------
    formats : Formats
    nodes : sequence of Node
        Those of the whole network.
    """

    def __init__(self, formats: Formats, nodes: Sequence[Node]) -> None:
        self.formats = formats
        self.in_float32 = formats.layers_in_float32([n.name for n in nodes if multiplies(n.layer)])

    def choose(self, nodes: Sequence[Node]) -> None:
        """Leave layers in float32, of the nodes that run.

        Raises
        ------
        ValueError
            If another one cannot compute its products apart.
        """
        for node in nodes:
            layer = node.layer
            if node.name in self.in_float32:
                for p in layer.parameters:
                    p.source.working = False
            elif self.formats.products and multiplies(layer) and not in_halves(layer):
                raise ValueError(
                    f"formats: {node.name} ({type(layer).__name__}) does not compute its products "
                    f"apart; add it to float32=, or omit products={self.formats.products}"
                )

    def forward(self, run: Run) -> Run:
        """Round the inputs of layers that multiply them by a matrix."""
        rounding = self.formats.activations
        if rounding is None:
            return run

        def rounded(node: Node, state: Any) -> Pass:
            if multiplies(layer := node.layer):
                values = {i.index: layer.accept(state.values[i.index]) for i in node.inputs}
                for index, x in values.items():
                    values[index] = self._input(rounding, layer, x, state.context)
                passed = run(node, replace(state, values=values))
                if not (self.formats.products and state.context.differentiable):
                    return passed
                return self._kept(passed, rounding, layer, layer.array(x), state.context)
            return run(node, state)

        return rounded

    def backward(self, run: Run) -> Run:
        """Round the gradients of the outputs of those layers."""
        rounding = self.formats.gradients
        if rounding is None:
            return run

        def rounded(node: Node, state: Any) -> Pass:
            if multiplies(layer := node.layer):
                dy = layer.accept(state.take(node))
                if self.formats.products:
                    return self._products(rounding, node, layer.array(dy), state)
                dy = self._gradient(rounding, layer, dy, state.context)
                state.add(node, dy, new=True)
            return run(node, state)

        return rounded

    def _input(self, rounding: Rounding, layer: Layer, x: Value, context: StepContext) -> Value:
        """Return a rounded copy of a layer's input; in training perhaps at random."""
        array = x if not isinstance(x, Deferred | Recomputed) else layer.array(x)
        noise = self._noise(rounding, layer, "activations", context)
        y = layer.backend.empty(array.shape, array.dtype)
        rounding.apply(layer.backend, array, out=y, noise=noise)
        if not isinstance(x, Deferred):
            return y
        value = x.of_terms(*x.terms, shift=x.shift)  # backward reads the terms
        value.array = y
        return value

    def _gradient(
        self, rounding: Rounding, layer: Layer, dy: Array | Deferred, context: StepContext
    ) -> Array | Deferred:
        """Return the rounded gradient of a layer's output.

        `context` is that of forward, which random numbers depend on.
        """
        array = layer.array(dy)
        new = array is not dy and not (isinstance(dy, Deferred) and array is dy.array)
        y = array if new or layer.overwrites_dy else layer.backend.empty(array.shape, array.dtype)
        noise = self._noise(rounding, layer, "gradients", context)
        rounding.apply(layer.backend, array, out=y, noise=noise)
        return Deferred.of(y, dy.sums) if isinstance(dy, Deferred) else y

    def _kept(
        self, passed: Pass, rounding: Rounding, layer: Layer, x: Array, context: StepContext
    ) -> Pass:
        """Run forward; keep the input as the gradient of the matrix reads it."""
        y, _ = yield from passed
        return y, self._down(rounding, layer, x, "rows of activations", context)

    def _products(self, rounding: Rounding, node: Node, dy: Array, state: Any) -> Pass:
        """Run the halves of backward, each with its own factors."""
        layer, weights, value = node.layer, self.formats.weights, None
        saved, state.residuals[node.index] = state.residuals[node.index], None
        rows = self._down(rounding, layer, dy, "rows of gradients", state.context)
        if layer.needs_dx:
            dy = self._gradient(rounding, layer, dy, state.context)
            w = next(p.source for p in layer.parameters if p.working)
            if weights is not None and (down := weights.down()) != weights:
                value, w.value = w.value, layer.backend.empty(w.shape, w.master.dtype)
                down.apply(layer.backend, w.master, out=w.value, axis=0)
        dxs, left = layer.backward_inputs(dy, saved)
        if value is not None:
            w.value = value
        if left is not None:
            layer.backward_parameters((rows, left[1]))
        deliver(node, state, dxs)
        return
        yield  # a generator, as all passes

    def _down(
        self, rounding: Rounding, layer: Layer, x: Array, use: str, context: StepContext
    ) -> Array:
        """Return an array rounded in blocks of rows, perhaps transformed meanwhile."""
        noise = self._noise(rounding, layer, use, context)
        backend = layer.backend
        y = backend.empty(x.shape, x.dtype)
        flat, out = (a.reshape(-1, x.shape[-1]) for a in (x, y))
        full = len(flat) // 16 * 16 if self.formats.products == HADAMARD else 0
        if full:
            turn, d = backend.elementwise.hadamard, backend.asarray(signs(context.seed))
            turn(flat[:full], d, out=out[:full])
            out[full:], x = flat[full:], y
        rounding.down().apply(backend, x, out=y, noise=noise)
        if full:
            turn(out[:full], d, out=out[:full], inverse=True)
        return y

    @staticmethod
    def _noise(rounding: Rounding, layer: Layer, use: str, context: StepContext) -> Noise | None:
        """Return the random words of an array; in an evaluation none."""
        if not (rounding.stochastic and context.training):
            return None
        name = stream(f"{layer.name}.{use}")
        return Noise(context.seed, name, context.epoch, context.samples)
