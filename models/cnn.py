"""Small convolutional networks: for handwritten digits, small images, and signals."""

from __future__ import annotations

from collections.abc import Sequence

from pydtnn.layers import (
    BatchNorm,
    Conv1d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool1d,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Rescale,
    Residual,
    Sequential,
)
from pydtnn.models.images import image_size
from pydtnn.models.units import unit
from pydtnn.utils.validate import check_int


def cnn(classes: int, input_shape: tuple[int, ...]) -> Sequential:
    """Two 3 x 3 convolutions, pooling, two fully connected layers: PyTorch's example for MNIST.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 6 x 6.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.
    """
    image_size("cnn", input_shape, at_least=6)
    return Sequential(
        Conv2d(32, 3, name="conv1"),
        ReLU(name="relu1"),
        Conv2d(64, 3, name="conv2"),
        ReLU(name="relu2"),
        MaxPool2d(2, name="pool"),
        Dropout(0.25, name="dropout1"),
        Flatten(name="flatten"),
        Linear(128, initializer="he_normal", name="fc1"),
        ReLU(name="relu3"),
        Dropout(0.5, name="dropout2"),
        Linear(classes, name="fc2"),
    )


def whitened_cnn(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    widths: Sequence[int] = (64, 128, 256),
    residual: Sequence[int] = (),
    kernel: int = 2,
    scale: float = 1 / 9,
) -> Sequential:
    """Wide convolutions of small maps, for the least time to an accuracy on small images.

    The first layer whitens patches. Each block has two 3 x 3 convolutions with batch norm, with a
    maximum over 2 x 2 pixels after the first one, where most operations would be. Residual units of
    two convolutions can replace the second one. Logits are multiplied by a small factor, so that
    the first steps are small in spite of a high rate.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least ``kernel - 1 + 2^len(widths)`` pixels.
    widths : sequence of int
        Filters of all convolutions of each block.
    residual : sequence of int
        Residual units of each block; a block with none, or without an entry, has a second
        convolution.
    kernel : int
        Side of the patches. The first layer has two filters of opposite signs for each number of a
        patch; ``--freeze whiten`` keeps its initial weights.
    scale : float
        Factor of the logits.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    References
    ----------
    Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, sections 2 and 3, after Page,
    "How to train your ResNet", 2019, whose last block has a residual unit. Here activations are
    ReLU and the first layer knows no images: see `pydtnn.layers.initializers.Whitening`.
    """
    check_int("whitened_cnn", "kernel", kernel, at_least=1)
    if not widths:
        raise ValueError(f"whitened_cnn: widths must not be empty, got {widths}")
    if len(residual) > len(widths):
        raise ValueError(f"whitened_cnn: residual must not be longer than widths, got {residual}")
    numbers = [check_int("whitened_cnn", "residual", n, at_least=0) for n in residual]
    numbers += [0] * (len(widths) - len(numbers))
    least = kernel - 1 + 2 ** len(widths)
    sides = image_size("whitened_cnn", input_shape, at_least=least)
    filters = 2 * kernel**2 * input_shape[-1]
    height, width = ((side - kernel + 1) >> len(widths) for side in sides)
    return Sequential(
        Conv2d(filters, kernel, initializer="whitening", name="whiten"),
        ReLU(name="relu"),
        *(
            Sequential(
                Conv2d(own, 3, padding=1, bias=False, name="conv"),
                MaxPool2d(2, name="pool"),
                BatchNorm(name="bn"),
                ReLU(name="relu"),
                *ending(own, number),
                name=f"block{i}",
            )
            for i, (own, number) in enumerate(zip(widths, numbers, strict=True), start=1)
        ),
        MaxPool2d((height, width), name="pool"),
        Flatten(name="flatten"),
        Linear(classes, bias=False, name="fc"),
        Rescale(scale, name="scale"),
    )


def ending(filters: int, residual: int) -> list[Net]:
    """Return the end of a block: residual units, or one convolution if there are none."""
    parts: list[Net] = [] if residual else [unit(filters, 3, padding=1, name="unit")]
    for i in range(1, residual + 1):
        first = unit(filters, 3, padding=1, name="unit1")
        second = unit(filters, 3, padding=1, activation=None, name="unit2")
        parts.append(Residual(Sequential(first, second, name=""), name=f"residual{i}"))
        parts.append(ReLU(name=f"relu{i}"))
    return parts


def cnn1d(classes: int, input_shape: tuple[int, ...], *, width: int = 128) -> Sequential:
    """Three convolutions of signals with batch norm, and the mean of all positions.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Signals ``(L, C)``, of any length.
    width : int
        Filters of the first and the last convolution; the second has twice as many.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        If the input is not a signal.

    References
    ----------
    Wang, Yan and Oates, "Time series classification from scratch with deep neural networks: a
    strong baseline", IJCNN 2017, section II.B.
    """
    if len(input_shape) != 2:
        raise ValueError(
            f"cnn1d: expected signals of shape (L, C), got {tuple(input_shape)}; use another "
            "network for images"
        )
    check_int("cnn1d", "width", width, at_least=1)
    windows = ((width, 8), (2 * width, 5), (width, 3))
    return Sequential(
        *(
            layer
            for i, (filters, kernel) in enumerate(windows, start=1)
            for layer in (
                Conv1d(filters, kernel, padding="same", bias=False, name=f"conv{i}"),
                BatchNorm(name=f"norm{i}"),
                ReLU(name=f"relu{i}"),
            )
        ),
        GlobalAvgPool1d(name="mean"),
        Linear(classes, name="head"),
    )
