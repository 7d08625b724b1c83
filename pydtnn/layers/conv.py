"""Convolutions: the base class, and that of images."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext, as_tuple, toggled
from pydtnn.layers.cost import NO_COST, Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.window import Padding, resolve_padding, split_shape
from pydtnn.utils.validate import check_int


class _Conv(Layer):
    """Base class of convolutions over `axes` spatial axes; see `Conv2d`."""

    axes: ClassVar[int]
    saves: tuple[str, ...] = ("input",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)
    adds_bias = True  # not on ranks whose outputs are added to those of another one

    def __init_subclass__(cls) -> None:
        """Disable 16-bit arrays for a subclass that overrides forward or backward."""
        own = {*vars(cls)}
        super().__init_subclass__()
        if own & {"forward", "backward"} and not own & {"supports", "takes_16_bits"}:
            cls.supports = toggled(cls.supports, "16 bits", False)

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, ...],
        *,
        stride: int | tuple[int, ...] = 1,
        padding: Padding = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        initializer: str | Initializer = "he_normal",
        bias_initializer: str | Initializer = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.filters = check_int(who, "filters", filters, at_least=1)
        self.kernel = as_tuple(kernel_size, self.axes, who, "kernel_size")
        self.stride = as_tuple(stride, self.axes, who, "stride")
        self.dilation = as_tuple(dilation, self.axes, who, "dilation")
        self.padding = padding
        self.groups = check_int(who, "groups", groups, at_least=1)
        self.bias = bias
        self.initializer = initializer
        self.bias_initializer = bias_initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (O, *kernel, C / groups) and b (O,)."""
        size, channels = split_shape(self, shapes, self.axes)
        self._check_groups(channels)
        kernel, stride, dilation, who = self.kernel, self.stride, self.dilation, type(self).__name__
        padding = resolve_padding(self.padding, size, kernel, stride, dilation, who)
        window = size, kernel, stride, padding, dilation
        self.looks_ahead = (0,) * (self.axes == 1 and padding[0][0] < dilation[0] * (kernel[0] - 1))
        self.geometry = ConvGeometry.shared(*window, channels, self.filters, self.groups)
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

    def _check_groups(self, channels: int) -> None:
        if channels % self.groups or self.filters % self.groups:
            raise self.fail(
                f"channels and filters must be divisible by groups={self.groups}, got {channels} "
                f"channels and {self.filters} filters"
            )

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Correlate with the filters and add the bias."""
        (x,) = xs
        y = self.empty(len(x), (*self.geometry.output, self.filters))
        self.backend.conv.forward(x, self.w.value, self._bias(), self.geometry, out=y)
        return y, x

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Compute ``db = sum dy``, dw (x correlated with dy), dx (dy scattered by the filters)."""
        x, w, conv = saved, self.w, self.backend.conv
        if w.frozen or not self.needs_dx:
            self.backward_parameters((dy, x))
            return self._backward_input(dy)
        self._backward_bias_sum(dy)
        dx, keep = self.empty(len(x), self.input_shapes[0]), w.accumulate
        conv.backward(x, dy, w.value, self.geometry, dx=dx, dw=w.grad, accumulate=keep)
        return dx

    def backward_inputs(self, dy: Array, saved: Saved) -> tuple[Array | None, Saved]:
        """Compute dx (dy scattered by the filters)."""
        return self._backward_input(dy), (dy, saved) if self.trainable else None

    def backward_parameters(self, left: Saved) -> None:
        """Compute ``db = sum dy``, dw (x correlated with dy)."""
        (dy, x), w = left, self.w
        self._backward_bias_sum(dy)
        if not w.frozen:
            conv = self.backend.conv
            conv.backward_filter(x, dy, self.geometry, out=w.grad, accumulate=w.accumulate)

    def _backward_input(self, dy: Array) -> Array | None:
        if not self.needs_dx:
            return None
        dx = self.empty(len(dy), self.input_shapes[0])
        self.backend.conv.backward_data(dy, self.w.value, self.geometry, out=dx)
        return dx

    def _backward_bias_sum(self, dy: Array) -> None:
        if self.bias and not self.b.frozen:
            self.backend.linear.backward_bias(dy, out=self.b.grad, accumulate=self.b.accumulate)

    def _bias(self) -> Array | None:
        return self.b.value if self.bias and self.adds_bias else None

    def cost(self, batch: int) -> Cost:
        """One convolution forward with the bias, one for dw, one for dx, and the sum of dy for db.

        The taps in the padding count. dw and dx are computed in one sweep over dy.
        """
        flops, (inputs, outputs) = self.geometry.flops(batch), self.elements(batch)
        itemsize, weights = self.dtype.itemsize, self.w.size
        dw, dx, db = not self.w.frozen, self.needs_dx, self._differentiates_bias()
        maps = outputs * (1 + db) + inputs * (dw + dx)
        return Cost(
            flops,
            flops * (dw + dx) + outputs * (self.bias and not self.b.frozen),
            (inputs + outputs + weights) * itemsize,
            (maps + weights * dx) * itemsize + weights * dw * self.parameter_dtype.itemsize,
        )

    def fused_cost(self, batch: int) -> Cost:
        """Return the part of the cost that is of what other layers would do: none."""
        return NO_COST

    def _differentiates_bias(self) -> bool:
        """Return whether backward sums dy in a sweep of its own."""
        return self.bias and not self.b.frozen


class Conv2d(_Conv):
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

    axes = 2
    supports: tuple[str, ...] = ("16 bits", "replay")
