"""Convolution with fused normalisation and activation, created by the fusion pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pydtnn.kernels import Deferred, Term
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Finisher, Saved, StepContext
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.cost import Cost
from pydtnn.layers.norm import FLOAT64, BatchNorm


class Evaluation(NamedTuple):
    """What a layer does to compute the values of a deferred input.

    Attributes
    ----------
    arrays : int
        Arrays that it reads.
    operations, differentiated : int
        Operations per element, in forward and in backward.
    stored : bool
        Whether it stores the values for other readers.
    fewer : bool
        Whether backward reads an array less than the values and the terms are: only the terms, as
        the values are dropped, or the values as the plain term.
    """

    arrays: int = 1
    operations: int = 0
    differentiated: int = 0
    stored: bool = False
    fewer: bool = False


class FusedConv2d(Conv2d, Finisher):
    """Convolution fused with neighbouring layers, with the same parameters.

    A `Deferred` input, the output of `NormAddReLU`, is computed while it is packed; the ReLU mask
    of its gradient and the sums over it are computed by the same kernel. A deferred dy is computed
    in the same way.

    Parameters
    ----------
    conv : Conv2d
        The layer of the model that this one replaces.

    Attributes
    ----------
    relu : bool
        Whether the following ReLU is applied to the output.
    absorbed : tuple of str
        The name of that ReLU.
    norm : BatchNorm or None
        The following batch norm. Its sums are computed by the convolution if the backend supports
        it, and in inference it is folded into the filters.
    constant : bool
        Whether the norm is also folded in training: the parameters of this layer, of the norm and
        of all layers before them are frozen. Set by the graph.
    evaluation : Evaluation
        How the input is computed, for the cost. Set by the fusion pass.
    """

    supports: tuple[str, ...] = ("16 bits", "deferred")

    def can_replay(self) -> bool:
        """Return whether filters are not folded in training, which is done by the array module."""
        return type(self) is FusedConv2d and not self.constant

    def __init__(self, conv: Conv2d) -> None:
        own = ("_arguments", "forward", "backward")  # not those of this class
        vars(self).update({name: it for name, it in vars(conv).items() if name not in own})
        self.replaced = type(conv)
        self.relu = False
        self.absorbed: tuple[str, ...] = ()
        self.norm: BatchNorm | None = None
        self.constant = False
        self.evaluation = Evaluation()

    def absorb_relu(self, name: str) -> None:
        """Fuse the following ReLU, of this name."""
        self.relu, self.may_overwrite = True, ("dy",)
        self.absorbed = (name,)
        self.saves = ("input", "output")

    def forward(
        self, *xs: Array | Deferred, context: StepContext
    ) -> tuple[Array | Deferred, Saved]:
        """Convolve, add the bias, apply the ReLU and compute the sums of a batch norm."""
        (x,) = xs
        w, b = self._folded() if self.folds(context) else (self.w.value, self._bias())
        y, sums = self.empty(len(x), self.output_shape), self._norm_sums(len(x), context)
        store = self.empty(len(x), self.input_shapes[0]) if self._stores(x, context) else None
        self.backend.conv.forward(
            x, w, b, self.geometry, out=y, relu=self.relu, store=store, sums=sums
        )
        if store is not None:
            x.array = store
        return (y if sums is None else Deferred.of(y, sums)), ((x, y) if self.relu else (x,))

    def _stores(self, x: Array | Deferred, context: StepContext) -> bool:
        """Return whether the values of a deferred input are needed later."""
        if not isinstance(x, Deferred) or x.array is not None:
            return False
        return x.keep or (self.backend.keeps_values and context.differentiable)

    def folds(self, context: StepContext) -> bool:
        """Return whether the norm is folded into the filters."""
        return self.norm is not None and (context.inference or self.constant)

    def _norm_sums(self, batch: int, context: StepContext) -> Array | None:
        if not context.training or not self.sums_for_norm(batch):
            return None
        if context.recomputing:  # the norm has kept what it needs
            return None
        return self.backend.empty((1 + 2 * self.filters,), FLOAT64)

    def _folded(self) -> tuple[Array, Array]:
        # gamma (x * w + b - mean) / std + beta is a convolution with other filters and bias
        assert self.norm is not None
        running = self.norm.running
        scale = self.norm.gamma.value / np.sqrt(running.variance + self.norm.epsilon)
        bias = self.b.value if self.bias else 0.0
        rounded = self.w.value.dtype == self.w.master.dtype  # otherwise below, once
        w = (self.w.value if rounded else self.w.master) * scale.reshape(
            -1, *(1,) * (self.axes + 1)
        )
        b = self.norm.beta.value + (bias - running.mean) * scale
        return w.astype(self.dtype), b.astype(self.parameter_dtype)

    def backward(self, dy: Array | Deferred, saved: Saved) -> Array | None:
        """Compute dw, db and dx."""
        return self._backward(dy, saved, None, gate=None)

    def finish_backward(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None
    ) -> Array | Deferred | None:
        """Compute the same, add `so_far` to dx, and gate dx by the ReLU of a deferred input.

        The mask is applied if the backend supports it; otherwise by the layer of the input.
        """
        x = saved[0]
        gated = isinstance(x, Deferred) and self.backend.gates and not x.restore().is_array
        return self._backward(dy, saved, so_far, gate=x if gated else None)

    def _backward(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None, *, gate: Deferred | None
    ) -> Array | Deferred | None:
        x, dy = saved[0], self._backward_bias(dy, *saved[1:])
        w, conv = self.w, self.backend.conv
        if isinstance(x, Deferred):
            x.restore()
        if not self.needs_dx:
            conv.backward_filter(x, dy, self.geometry, out=w.grad, accumulate=w.accumulate)
            return None
        shape = (*self.geometry.size, self.geometry.channels)
        dx = self.empty(len(x), shape) if so_far is None else so_far
        sums = None
        if gate is not None:
            kinds = 1 + len(gate.terms)
            sums = self.backend.empty((kinds, self.geometry.channels), FLOAT64)
        if w.frozen:
            conv.backward_data(dy, w.value, self.geometry, out=dx, add=so_far, gate=gate, sums=sums)
        else:
            conv.backward(
                x,
                dy,
                w.value,
                self.geometry,
                dx=dx,
                dw=w.grad,
                accumulate=w.accumulate,
                add=so_far,
                gate=gate,
                sums=sums,
            )
        return dx if sums is None else Deferred.of(dx, sums)

    def _backward_bias(self, dy: Array | Deferred, y: Array | None = None) -> Array | Deferred:
        """Differentiate the bias, and the ReLU if `y` is its output; return the gradient of x."""
        sums = dy.sums if isinstance(dy, Deferred) else None
        if y is not None:
            deferred, dy = isinstance(dy, Deferred), self.array(dy)
            dz = dy if deferred else self.gradient_like(dy)  # new values may be overwritten
            sums = self.backend.empty((2, self.filters), "float64")
            self.backend.fused.gate(dy, Deferred(Term(y), relu=True), out=dz, sums=sums)
            dy = dz
        if self.bias and sums is not None and not self.b.frozen:
            convert = self.backend.elementwise.convert
            convert(sums[0], out=self.b.grad, accumulate=self.b.accumulate)
        elif self.bias and sums is None and not self.b.frozen:
            self.backend.linear.backward_bias(dy, out=self.b.grad, accumulate=self.b.accumulate)
        return dy

    def cost(self, batch: int) -> Cost:
        """The convolution, and the operations of other layers that it does in the same sweeps.

        A deferred input is computed in forward, and again for dw unless its values are stored. If a
        norm follows, forward sums the output and backward computes dy, from two arrays. A ReLU of
        its own is differentiated in a sweep before.
        """
        return super().cost(batch) + self.fused_cost(batch)

    def fused_cost(self, batch: int) -> Cost:
        """Return the cost of what is fused with the convolution."""
        (inputs, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        arrays, operations, differentiated, stored, fewer = self.evaluation
        normed = self.norm is not None
        gates = self.finishes and self.backend.gates
        flops = differentiated * gates * inputs + (self.relu + 4 * normed) * outputs
        maps = (arrays - 1 + 2 * stored - fewer) * inputs + (3 * self.relu + normed) * outputs
        return Cost(
            operations * inputs + (self.relu + 3 * self.sums_for_norm(batch)) * outputs,
            flops,
            (arrays - 1 + stored) * inputs * itemsize,
            maps * itemsize,
        )

    def sums_for_norm(self, batch: int) -> bool:
        """Return whether forward computes the sums of the following norm in training."""
        if self.norm is None or self.norm.running.frozen:
            return False
        return self.backend.conv.takes_sums(
            self.geometry, batch, self.dtype, bias=self.bias, relu=self.relu
        )

    def _differentiates_bias(self) -> bool:
        """Return whether dy is summed in a sweep of its own: not if another one has the sum."""
        return super()._differentiates_bias() and not self.relu and self.norm is None
