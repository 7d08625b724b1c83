"""Layers of signals: convolution and pooling over one axis, such as time."""

from __future__ import annotations

from pydtnn.layers.conv import _Conv
from pydtnn.layers.pool import _AvgPool, _GlobalAvgPool, _MaxPool


class Conv1d(_Conv):
    """Cross-correlation of signals with learned filters.

    ``y[n, p, o] = b[o] + sum over taps t and channels c of x[n, p s + t d, c] w[o, t, c]``

    Parameters
    ----------
    filters : int
        Channels of the output.
    kernel_size : int
    stride, dilation : int
    padding : int, ((before, after),), "same" or "valid"
        ``((dilation (kernel_size - 1), 0),)`` makes it causal: an output does not depend on later
        positions.
    groups : int
        Filters and channels are split into this many groups that do not mix; ``groups = channels``
        is depthwise.
    bias : bool
    initializer, bias_initializer : str or Initializer

    Notes
    -----
    Input ``(N, L, C)``, output ``(N, OL, O)``, parameters ``w (O, k, C / groups)`` and ``b (O,)``.
    Plans cut its filters, channels and samples, not its positions.
    """

    axes = 1


class MaxPool1d(_MaxPool):
    """Maximum of each window without padding; the first of equal values gets the gradient.

    Parameters
    ----------
    kernel_size : int
    stride : int, optional
        By default the kernel's size: windows that do not overlap.
    padding : int, ((before, after),), "same" or "valid"

    Notes
    -----
    Input ``(N, L, C)``, output ``(N, OL, C)``.
    """

    axes = 1


class AvgPool1d(_AvgPool):
    """Mean of each window; by default padding is counted as zeros.

    Parameters
    ----------
    kernel_size, stride, padding
        As in `MaxPool1d`.
    count_padding : bool
        Whether the zeros of the padding count in the mean.
    """

    axes = 1


class GlobalAvgPool1d(_GlobalAvgPool):
    """Mean of each channel over all positions: input ``(N, L, C)``, output ``(N, C)``."""

    axes = 1
