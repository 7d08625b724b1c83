"""Convolution of images."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import numpy as np

from pydtnn.kernels import ConvGeometry, Deferred, Term
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Cost, Finisher, Layer, Saved, Shape, StepContext, as_tuple
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.norm import BatchNorm
from pydtnn.layers.window import Padding, resolve_padding
from pydtnn.utils.validate import whole


class Conv2d(Layer, Finisher):
    """Cross-correlation with learned filters.

    ``y[n, p, o] = b[o] + sum over taps t and channels c of x[n, p s + t d, c] w[o, t, c]``

    Parameters
    ----------
    filters : int
        Channels of the output.
    kernel_size : int or pair
    stride, dilation : int or pair
    padding : int, pair, pair of (before, after), "same" or "valid"
    groups : int
        Filters and channels are split into this many groups that do not mix; ``groups = channels``
        is depthwise.
    bias : bool
    initializer, bias_initializer : str or Initializer

    Notes
    -----
    Input ``(N, H, W, C)``, output ``(N, OH, OW, O)``, parameters ``w (O, kh, kw, C / groups)`` and
    ``b (O,)``.
    """

    axes: ClassVar[int] = 2
    saves: tuple[str, ...] = ("input",)
    new_output = new_gradient = takes_deferred = takes_16_bits = True

    relu = False
    """Whether the output is cut off below 0, in place of a ReLU that follows."""

    norm: BatchNorm | None = None
    """Set by the fusion pass: the batch norm that follows. Its sums are taken in passing where the
    backend can, and in inference it is folded into the filters."""

    def __init_subclass__(cls) -> None:
        """Give arrays of at least 32 bits to a subclass that computes in its own way."""
        if {"forward", "backward"} & vars(cls).keys():
            cls.takes_deferred = cls.takes_16_bits = False

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] = 1,
        padding: Padding = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        initializer: str | Initializer = "he_normal",
        bias_initializer: str | Initializer = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.filters = whole(who, "filters", filters, at_least=1)
        self.kernel = as_tuple(kernel_size, self.axes, who, "kernel_size")
        self.stride = as_tuple(stride, self.axes, who, "stride")
        self.dilation = as_tuple(dilation, self.axes, who, "dilation")
        self.padding = padding
        self.groups = whole(who, "groups", groups, at_least=1)
        self.bias = bias
        self.initializer = initializer
        self.bias_initializer = bias_initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (O, kh, kw, C / groups) and b (O,)."""
        shape = self.single(shapes)
        if len(shape) != self.axes + 1:
            raise self.fail(f"expected an input of shape (H, W, C), got {shape}")
        *size, channels = shape
        if channels % self.groups or self.filters % self.groups:
            raise self.fail(
                f"{channels} channels and {self.filters} filters must both be divisible by "
                f"groups={self.groups}"
            )
        padding = resolve_padding(
            self.padding, tuple(size), self.kernel, self.stride, self.dilation, type(self).__name__
        )
        self.geometry = ConvGeometry.shared(
            tuple(size),
            self.kernel,
            self.stride,
            padding,
            self.dilation,
            channels,
            self.filters,
            self.groups,
        )
        taps = prod(self.kernel)
        self.w = self.parameter(
            "w",
            self.geometry.weight_shape,
            self.initializer,
            fan_in=taps * channels // self.groups,
            fan_out=taps * self.filters // self.groups,
            working=True,
        )
        if self.bias:
            self.b = self.parameter("b", (self.filters,), self.bias_initializer, decay=False)
        return (*self.geometry.output, self.filters)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array | Deferred, Saved]:
        """Correlate with the filters and add the bias."""
        (x,) = xs
        deferred = isinstance(x, Deferred) and x.array is None
        keeps = deferred and (x.keep or (self.backend.keeps_values and context.differentiable))
        store = self.empty(len(x), self.input_shapes[0]) if keeps else None
        y = self.empty(len(x), self.output_shape)
        sums = None
        if self.norm and context.training and self._takes_sums(len(x)):
            sums = self.backend.empty((1 + 2 * self.filters,), "float64")
        w, b = self._folded() if self.norm and context.inference else (self.w.value, self._bias())
        self.backend.conv.forward(
            x, w, b, self.geometry, out=y, relu=self.relu, store=store, sums=sums
        )
        if store is not None:
            x.array = store
        return (y if sums is None else Deferred.of(y, sums)), ((x, y) if self.relu else (x,))

    def _takes_sums(self, batch: int) -> bool:
        kind = {"bias": self.bias, "relu": self.relu}
        return self.backend.conv.takes_sums(self.geometry, batch, self.dtype, **kind)

    def absorb_relu(self) -> None:
        """Take over a ReLU that follows; called by the fusion pass."""
        self.relu = self.may_overwrite_dy = True
        self.saves = ("input", "output")

    def _bias(self) -> Array | None:
        return self.b.value if self.bias else None

    def _folded(self) -> tuple[Array, Array]:
        # gamma (x * w + b - mean) / std + beta is a convolution with other filters and bias
        assert self.norm is not None
        running = self.norm.running
        scale = self.norm.gamma.value / np.sqrt(running.variance + self.norm.epsilon)
        bias = self.b.value if self.bias else 0.0
        w = self.w.master * scale.reshape(-1, *(1,) * (self.axes + 1))
        b = self.norm.beta.value + (bias - running.mean) * scale
        return w.astype(self.dtype), b.astype(self.parameter_dtype)

    def backward(self, dy: Array | Deferred, saved: Saved) -> Array | None:
        """Compute dw (x correlated with dy), ``db = sum dy``, dx (dy scattered by the filters)."""
        return self._backward(dy, saved, None, gate=None)

    def finish_backward(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None
    ) -> Array | Deferred | None:
        """Compute the same, add `so_far` to dx, and gate dx by the ReLU of a deferred input.

        The last where the backend does it in passing; otherwise it is left to the input's layer.
        """
        x = saved[0]
        gate = x if isinstance(x, Deferred) and self.backend.gates else None
        return self._backward(dy, saved, so_far, gate=gate)

    def _backward(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None, *, gate: Deferred | None
    ) -> Array | Deferred | None:
        x, w, conv = saved[0], self.w, self.backend.conv
        dy = self._backward_bias(dy, *saved[1:])
        if not self.needs_dx:
            conv.backward_filter(x, dy, self.geometry, out=w.grad, accumulate=w.accumulate)
            return None
        dx = self.empty(len(x), self.input_shapes[0]) if so_far is None else so_far
        sums = None
        if gate is not None:
            kinds = 1 + len(gate.terms)
            sums = self.backend.empty((kinds, self.geometry.channels), "float64")
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
        """Differentiate the bias, and the ReLU if `y` is its output; return what is left of dy."""
        sums = dy.sums if isinstance(dy, Deferred) else None
        if y is not None:
            deferred, dy = isinstance(dy, Deferred), self.array(dy)
            dz = dy if deferred else self.gradient_like(dy)  # values just computed are ours
            sums = self.backend.empty((2, self.filters), "float64")
            self.backend.fused.gate(dy, Deferred(Term(y), relu=True), out=dz, sums=sums)
            dy = dz
        if self.bias and sums is not None:
            self.b.store_grad(sums[0])
        elif self.bias:
            self.backend.linear.backward_bias(dy, out=self.b.grad, accumulate=self.b.accumulate)
        return dy

    def cost(self, batch: int) -> Cost:
        """One convolution forward, one for dw and one for dx."""
        flops = self.geometry.flops(batch)
        arrays = batch * (prod(self.input_shapes[0]) + prod(self.output_shape)) + self.w.size
        moved = arrays * self.dtype.itemsize
        return Cost(flops, flops * (1 + self.needs_dx), moved, moved * (1 + self.needs_dx))
