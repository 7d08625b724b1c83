"""Bits that are flipped in a training run, as failing hardware does, for tests and studies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.observed import wrapped_kernels
from pydtnn.layers.node import Node
from pydtnn.model.passes import Hook, Pass, Run
from pydtnn.training.callback import Callback, Training

PRODUCTS = ("linear.", "conv.", "attention.", "recurrent.")
"""First words of the names of kernels that multiply matrices."""


class Flip(NamedTuple):
    """A bit that changes once.

    Attributes
    ----------
    kind : {"product", "output", "parameter", "message"}
        In the result of a kernel that multiplies, the output of a layer, a parameter before its
        layer runs forward, or what a rank sends.
    rank : int
    step : int
        Updates before the step.
    call : int
        Place among the results of this kind in the step, on this rank.
    element, bit : int
        Position in the array and in the element, both modulo what there is.
    """

    kind: str
    rank: int
    step: int
    call: int
    element: int
    bit: int


class Flips(Callback, Hook):
    """Flip bits while a model is trained.

    Parameters
    ----------
    flips : sequence of Flip
        Those of all ranks.

    Attributes
    ----------
    applied : list of Flip
        Of this rank.
    calls : Counter
        Results of each kind in the present step.

    Examples
    --------
    >>> flips = Flips([Flip("product", rank=1, step=3, call=0, element=5, bit=30)])
    """

    reads_gradients = False

    def __init__(self, flips: Sequence[Flip]) -> None:
        self.flips, self.applied, self.calls = flips, list[Flip](), Counter[str]()
        self._stack, self._step = ExitStack(), -1

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Flip bits from now on."""
        comm: Any = trainer.exchange.comm
        self._rank, self._optimizer, send = comm.rank, trainer.optimizer, comm._isend
        self._stack.enter_context(wrapped_kernels(trainer.model.backend, self._wrap))
        if {flip.kind for flip in self.flips} & {"output", "parameter"}:
            trainer.model.graph.hooks.append(self)
            self._stack.callback(trainer.model.graph.hooks.remove, self)
        comm._isend = lambda array, *to: send(self.touch("message", array.copy()), *to)
        self._stack.callback(setattr, comm, "_isend", send)

    def close(self) -> None:
        """Flip no bits any more."""
        self._stack.close()

    def touch(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count an array, and flip a bit of it if it is time."""
        if self._step != self._optimizer.iterations:
            self._step, self.calls = self._optimizer.iterations, Counter()
        for flip in self.flips:
            if flip[:4] == (kind, self._rank, self._step, self.calls[kind]) and array.size:
                place = flip.element * array.itemsize + flip.bit // 8 % array.itemsize
                raw = array.view(np.uint8)
                raw[np.unravel_index(place % raw.size, raw.shape)] ^= 1 << flip.bit % 8
                self.applied.append(flip)
        self.calls[kind] += 1
        return array

    def forward(self, run: Run) -> Run:
        """Flip bits of parameters and outputs of training."""

        def flipped(node: Node, state: Any) -> Pass:
            for parameter in node.layer.parameters if state.context.training else ():
                self.touch("parameter", parameter.master)
            result = yield from run(node, state)
            if state.context.training and isinstance(result[0], np.ndarray):
                self.touch("output", result[0])
            return result

        return flipped

    def _wrap(self, kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
        def flipped(*args: Any, **options: Any) -> Any:
            result = kernel(*args, **options)
            if (out := options.get("out", options.get("dw"))) is not None:
                self.touch("product", out)
            return result

        return flipped if name.startswith(PRODUCTS) else kernel
