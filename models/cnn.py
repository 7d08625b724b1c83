"""Small convolutional networks: for handwritten digits, and for signals."""

from __future__ import annotations

from pydtnn.layers import (
    BatchNorm,
    Conv1d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool1d,
    Linear,
    MaxPool2d,
    ReLU,
    Sequential,
)
from pydtnn.models.images import image_size
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
