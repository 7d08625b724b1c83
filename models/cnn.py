"""A small convolutional network for handwritten digits."""

from __future__ import annotations

from pydtnn.layers import Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sequential
from pydtnn.models.images import image_size


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
