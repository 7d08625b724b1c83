"""Transposed convolution of images."""

from __future__ import annotations

from math import prod

from pydtnn.kernels import ConvGeometry, Deferred, Term
from pydtnn.kernels.geometry import output_size
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.conv import _Conv
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.window import Padding, resolve_padding, split_shape


class ConvTranspose2d(_Conv):
    """The transpose of a convolution: each input pixel adds a filter to the output, scaled by it.

    ``y[n, p s + t d, o] = b[o] + sum over taps t and channels c of x[n, p, c] w[c, t, o]``, without
    the first and last `padding` rows and columns of that. It has the shapes, and computes the
    gradient of the input, of a `Conv2d` with the same options.

    Parameters
    ----------
    filters : int
        Channels of the output.
    kernel_size : int or pair
    stride, dilation : int or pair
    padding : int, pair, pair of (before, after), or "valid"
        Rows and columns that are cut off.
    output_padding : int or pair
        Rows and columns at the end of the output that are added to it; smaller than the stride.
        They receive what the filters add there.
    groups : int
        Filters and channels are split into this many groups that do not mix.
    bias : bool
    initializer, bias_initializer : str or Initializer

    Notes
    -----
    Input ``(N, H, W, C)``, output ``(N, OH, OW, O)`` with ``OH = (H - 1) s + d (kh - 1) + 1 -
    padding + output_padding``, parameters ``w (C, kh, kw, O / groups)`` and ``b (O,)``. Plans cut
    it by samples only.

    References
    ----------
    Zeiler, Krishnan, Taylor and Fergus, "Deconvolutional networks", CVPR 2010; Dumoulin and Visin,
    "A guide to convolution arithmetic for deep learning", 2016, section 4.
    """

    axes = 2
    supports = ("16 bits",)

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, ...],
        *,
        stride: int | tuple[int, ...] = 1,
        padding: Padding = 0,
        output_padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        initializer: str | Initializer = "he_normal",
        bias_initializer: str | Initializer = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(
            filters,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            initializer=initializer,
            bias_initializer=bias_initializer,
            name=name,
        )
        self.output_padding = self._output_padding(output_padding)

    def _output_padding(self, given: int | tuple[int, ...]) -> tuple[int, ...]:
        values = tuple(given) if isinstance(given, tuple | list) else (given,) * self.axes
        fit = len(values) == self.axes and all(
            isinstance(n, int) and 0 <= n < s for n, s in zip(values, self.stride, strict=True)
        )
        if not fit:
            raise self.fail(
                f"output_padding must be {self.axes} ints from 0 to below stride {self.stride}, "
                f"or one, got {given!r}"
            )
        return values

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (C, kh, kw, O / groups) and b (O,)."""
        size, channels = split_shape(self, shapes, self.axes)
        self._check_groups(channels)
        if self.padding == "same":
            raise self.fail(
                'padding must be ints or "valid", got "same"; use padding and output_padding'
            )
        whole = tuple(
            (n - 1) * s + d * (k - 1) + 1 + more
            for n, s, d, k, more in zip(
                size, self.stride, self.dilation, self.kernel, self.output_padding, strict=True
            )
        )
        who = type(self).__name__
        pairs = resolve_padding(self.padding, whole, self.kernel, self.stride, self.dilation, who)
        output = tuple(n - sum(pair) for n, pair in zip(whole, pairs, strict=True))
        if min(output) < 1:
            raise self.fail(f"padding must leave some of the output {whole}, got {self.padding}")
        # of the convolution whose transpose this is: from the output to the input
        fields = (output, self.kernel, self.stride, pairs, self.dilation, self.filters, channels)
        self.geometry = ConvGeometry.shared(*fields, self.groups)
        assert output_size(*fields[:5]) == size
        taps = prod(self.kernel)
        self.w = self.parameter(
            "w",
            self.geometry.weight_shape,
            self.initializer,
            # with a stride, an output receives only some of the taps
            fan_in=max(taps * channels // (self.groups * prod(self.stride)), 1),
            fan_out=taps * self.filters // self.groups,
            working=True,
        )
        if self.bias:
            self.b = self.parameter("b", (self.filters,), self.bias_initializer, decay=False)
        return (*output, self.filters)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Scatter the filters, and add the bias."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        self.backend.conv.backward_data(x, self.w.value, self.geometry, out=y)
        if self.bias:
            self.backend.fused.evaluate(Deferred(Term(y), shift=self.b.value), out=y)
        return y, x

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Compute ``db = sum dy``, dw (dy correlated with x), dx (dy correlated with w)."""
        x, w, conv = saved, self.w, self.backend.conv
        if self.bias and not self.b.frozen:
            self.backend.linear.backward_bias(dy, out=self.b.grad, accumulate=self.b.accumulate)
        if not w.frozen:
            conv.backward_filter(dy, x, self.geometry, out=w.grad, accumulate=w.accumulate)
        if not self.needs_dx:
            return None
        dx = self.empty(len(x), self.input_shapes[0])
        conv.forward(dy, w.value, None, self.geometry, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """One convolution forward, one for dw, one for dx; a sweep each for the bias and for db.

        The taps that fall into the padding count.
        """
        flops, (inputs, outputs) = self.geometry.flops(batch), self.elements(batch)
        itemsize, weights = self.dtype.itemsize, self.w.size
        dw, dx, db = not self.w.frozen, self.needs_dx, self._differentiates_bias()
        maps = outputs * (db + dw + dx) + inputs * (dw + dx)
        return Cost(
            flops + outputs * self.bias,
            flops * (dw + dx) + outputs * db,
            (inputs + outputs * (1 + 2 * self.bias) + weights) * itemsize,
            (maps + weights * dx) * itemsize + weights * dw * self.parameter_dtype.itemsize,
        )
