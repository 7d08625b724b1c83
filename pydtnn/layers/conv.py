"""Convolution of images."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from pydtnn.initializers import Initializer
from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Cost, Layer, Saved, Shape, StepContext, as_tuple
from pydtnn.layers.window import Padding, resolve_padding
from pydtnn.limits import whole


class Conv2d(Layer):
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
    saves = ("input",)
    new_output = new_gradient = True

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
        self.geometry = ConvGeometry(
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
        )
        if self.bias:
            self.b = self.parameter("b", (self.filters,), self.bias_initializer, decay=False)
        return (*self.geometry.output, self.filters)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Correlate with the filters and add the bias."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        b = self.b.value if self.bias else None
        self.backend.conv.forward(x, self.w.value, b, self.geometry, out=y)
        return y, x

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Compute dw (x correlated with dy), ``db = sum dy``, dx (dy scattered by the filters)."""
        x, w, conv = saved, self.w, self.backend.conv
        conv.backward_filter(x, dy, self.geometry, out=w.grad, accumulate=w.accumulate)
        if self.bias:
            self.backend.linear.backward_bias(dy, out=self.b.grad, accumulate=self.b.accumulate)
        if not self.needs_dx:
            return None
        dx = self.empty(len(x), self.input_shapes[0])
        conv.backward_data(dy, w.value, self.geometry, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """One convolution forward, one for dw and one for dx."""
        flops = self.geometry.flops(batch)
        arrays = batch * (prod(self.input_shapes[0]) + prod(self.output_shape)) + self.w.size
        moved = arrays * self.dtype.itemsize
        return Cost(flops, flops * (1 + self.needs_dx), moved, moved * (1 + self.needs_dx))
