"""Warning about an input shape that is valid, but probably not what is meant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pydtnn.layers.conv import Conv2d
from pydtnn.layers.node import Node

COLOURS = (1, 3, 4)
"""Numbers of channels of images."""

SMALLEST = 24
"""Height of the smallest usual images, in pixels: smaller shapes may be feature maps."""


def warn_of_channels_first(inputs: Sequence[Node]) -> None:
    """Warn if a convolution reads an input of shape (C, H, W), as other libraries store images.

    That is, one whose first axis is a number of colours, followed by two equal ones of the size of
    an image.
    """
    for node in inputs:
        if len(node.shape) != 3 or not any(isinstance(n.layer, Conv2d) for n in node.consumers):
            continue
        c, h, w = node.shape
        if c in COLOURS and h == w >= SMALLEST:
            warnings.warn(
                f"Model: input_shape {node.shape} means an image of {c} x {h} pixels and {w} "
                f"channels; if it has {c} channels, use {(h, w, c)}, and "
                "ArrayDataset(x, y, channels_first=True) for arrays (n, C, H, W)",
                stacklevel=3,
            )
