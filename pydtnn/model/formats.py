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

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from pydtnn.kernels import Deferred
from pydtnn.kernels.number_format import Rounding
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import Noise, stream
from pydtnn.layers.base import Layer, StepContext
from pydtnn.layers.node import Node
from pydtnn.layers.recomputed import Recomputed, Value
from pydtnn.model.passes import Hook, Pass, Run


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

    Raises
    ------
    ValueError
    """

    activations: Rounding | None = None
    weights: Rounding | None = None
    gradients: Rounding | None = None
    optimizer: Rounding | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights.stochastic:
            raise ValueError(
                "formats: weights are copies of float32 values, whose errors do not accumulate; "
                "round them to nearest, without stochastic"
            )

    @classmethod
    def parse(cls, text: str) -> Formats:
        """Return what a text such as "activations=e4m3fn,gradients=e5m2,weights=e2m1:32" describes.

        Each part is a use and its `Rounding.parse`.

        Raises
        ------
        ValueError
        """
        known = [field.name for field in fields(cls)]
        given: dict[str, Rounding] = {}
        for item in text.split(","):
            use, _, form = item.partition("=")
            use = use.strip()
            if use not in known or use in given:
                raise ValueError(
                    f"formats: expected each of {', '.join(known)} at most once, with a format, "
                    f"such as activations=e4m3fn,weights=e2m1:32, got {text!r}; for messages, use "
                    "a compressor such as int8"
                )
            try:
                given[use] = Rounding.parse(form)
            except ValueError as error:
                raise ValueError(f"formats: {use}: {error}") from None
        return cls(**given)


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
    random = any(r.stochastic for r in vars(formats).values() if r is not None)
    if random and device == "cuda":
        raise ValueError("Model: stochastic formats require the device cpu or numpy, got cuda")
    return formats


def multiplies(layer: Layer) -> bool:
    """Return whether a layer multiplies its input by a matrix."""
    return any(p.working for p in layer.parameters)


class Rounder(Hook):
    """Rounds the inputs and gradients of the layers of a graph.

    Parameters
    ----------
    formats : Formats
    """

    def __init__(self, formats: Formats) -> None:
        self.formats = formats

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
                state = replace(state, values=values)
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
                dy = self._gradient(rounding, layer, dy, state.context)
                state.add(node, dy, new=True)
            return run(node, state)

        return rounded

    def _input(self, rounding: Rounding, layer: Layer, x: Value, context: StepContext) -> Value:
        """Return a rounded copy of a layer's input; in training perhaps at random."""
        array = x if not isinstance(x, Deferred | Recomputed) else layer.array(x)
        random = rounding.stochastic and context.training
        noise = self._noise(layer, "activations", context) if random else None
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
        noise = self._noise(layer, "gradients", context) if rounding.stochastic else None
        rounding.apply(layer.backend, array, out=y, noise=noise)
        return Deferred.of(y, dy.sums) if isinstance(dy, Deferred) else y

    @staticmethod
    def _noise(layer: Layer, use: str, context: StepContext) -> Noise:
        name = stream(f"{layer.name}.{use}")
        return Noise(context.seed, name, context.epoch, context.samples)
