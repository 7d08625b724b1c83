"""Layers of volumes: convolution and pooling over three spatial axes."""

from __future__ import annotations

from pydtnn.layers.conv import _Conv
from pydtnn.layers.pool import _AvgPool, _GlobalAvgPool, _MaxPool


class Conv3d(_Conv):
    """Cross-correlation of volumes with learned filters.

    ``y[n, p, o] = b[o] + sum over taps t and channels c of x[n, p s + t d, c] w[o, t, c]``

    Parameters
    ----------
    filters : int
        Channels of the output.
    kernel_size : int or triple
    stride, dilation : int or triple
    padding : int, triple, triple of (before, after), "same" or "valid"
    groups : int
        Filters and channels are split into this many groups that do not mix; ``groups = channels``
        is depthwise.
    bias : bool
    initializer, bias_initializer : str or Initializer

    Notes
    -----
    Input ``(N, D, H, W, C)``, output ``(N, OD, OH, OW, O)``, parameters ``w (O, kd, kh, kw, C /
    groups)`` and ``b (O,)``. Plans cut its filters, channels and samples, not its volumes.
    """

    axes = 3


class MaxPool3d(_MaxPool):
    """Maximum of each window without padding; the first of equal values gets the gradient.

    Parameters
    ----------
    kernel_size : int or triple
    stride : int or triple, optional
        By default the kernel's size: windows that do not overlap.
    padding : int, triple, triple of (before, after), "same" or "valid"

    Notes
    -----
    Input ``(N, D, H, W, C)``, output ``(N, OD, OH, OW, C)``.
    """

    axes = 3


class AvgPool3d(_AvgPool):
    """Mean of each window; by default padding is counted as zeros.

    Parameters
    ----------
    kernel_size, stride, padding
        As in `MaxPool3d`.
    count_padding : bool
        Whether the zeros of the padding count in the mean.
    """

    axes = 3


class GlobalAvgPool3d(_GlobalAvgPool):
    """Mean of each channel over the whole volume: input ``(N, D, H, W, C)``, output ``(N, C)``."""

    axes = 3
