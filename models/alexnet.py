"""AlexNet, in the form with one tower."""

from __future__ import annotations

from pydtnn.layers import (
    AdaptiveAvgPool2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    LocalResponseNorm,
    MaxPool2d,
    ReLU,
    Sequential,
)
from pydtnn.models.images import image_size, is_small


def alexnet(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    features: int = 4096,
    dropout: float = 0.5,
    local_response: bool = False,
) -> Sequential:
    """Five convolutions; small images keep more of their size and have one fully connected layer.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 29 x 29; below 64 x 64 they get the small form.
    features : int
        Of each hidden fully connected layer.
    dropout : float
        Rate before each of these.
    local_response : bool
        Whether the first two ReLUs are followed by local response normalisation, as in the network
        of 2012, with its constants.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    References
    ----------
    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 5.
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012, section 3.3.
    """
    height, width = image_size("alexnet", input_shape, at_least=29)
    small = is_small(input_shape)
    window, padding = (2, 5) if small else (3, 2)
    norms = [_response(f"norm{i}") for i in (1, 2)] if local_response else []
    convolutions = Sequential(
        Conv2d(64, 11, stride=4, padding=padding, name="conv1"),
        ReLU(name="relu1"),
        *norms[:1],
        MaxPool2d(window, stride=2, name="pool1"),
        Conv2d(192, 5, padding=2, name="conv2"),
        ReLU(name="relu2"),
        *norms[1:],
        MaxPool2d(window, stride=2, name="pool2"),
        Conv2d(384, 3, padding=1, name="conv3"),
        ReLU(name="relu3"),
        Conv2d(256, 3, padding=1, name="conv4"),
        ReLU(name="relu4"),
        Conv2d(256, 3, padding=1, name="conv5"),
        ReLU(name="relu5"),
        MaxPool2d(window, stride=2, name="pool3"),
        name="",
    )
    if small:
        return Sequential(convolutions, GlobalAvgPool2d(name="pool4"), Linear(classes, name="fc"))
    return Sequential(
        convolutions,
        AdaptiveAvgPool2d((min(6, _grid(height)), min(6, _grid(width))), name="pool4"),
        Flatten(name="flatten"),
        Dropout(dropout, name="dropout1"),
        Linear(features, initializer="he_normal", name="fc1"),
        ReLU(name="relu6"),
        Dropout(dropout, name="dropout2"),
        Linear(features, initializer="he_normal", name="fc2"),
        ReLU(name="relu7"),
        Linear(classes, name="fc3"),
    )


def _grid(pixels: int) -> int:
    """Positions that are left of a side of a large image after the convolutions: 6 of 224."""
    positions = (pixels + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        positions = (positions - 3) // 2 + 1
    return positions


def _response(name: str) -> LocalResponseNorm:
    """The constants of 2012, whose alpha of 1e-4 is that of a sum; here it is that of the mean."""
    return LocalResponseNorm(5, alpha=5 * 1e-4, beta=0.75, k=2.0, name=name)
