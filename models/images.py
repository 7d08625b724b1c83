"""What the networks for images ask of their input."""

from __future__ import annotations

SMALL = 64
"""Images with a side below this many pixels get the CIFAR form of an ImageNet network."""


def image_size(who: str, input_shape: tuple[int, ...], at_least: int) -> tuple[int, int]:
    """Return height and width of an input ``(H, W, C)`` that is large enough.

    Raises
    ------
    ValueError
        If the input is no image, or one with a side below `at_least` pixels.
    """
    if len(input_shape) != 3:
        raise ValueError(f"{who}: expected images of shape (H, W, C), got {tuple(input_shape)}")
    height, width, _ = input_shape
    if min(height, width) < at_least:
        raise ValueError(
            f"{who}: images must be at least {at_least} x {at_least}, got {height} x {width}; "
            "enlarge or pad them, or take a network with fewer stages such as resnet20 or mlp"
        )
    return height, width


def is_small(input_shape: tuple[int, ...]) -> bool:
    """Whether images are nearer to CIFAR's 32 x 32 than to ImageNet's 224 x 224."""
    return min(input_shape[:2]) < SMALL
