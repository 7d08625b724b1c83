"""Multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from pydtnn.layers import Dropout, Flatten, Linear, Net, ReLU, Sequential


def mlp(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    hidden: Sequence[int] = (512, 512),
    dropout: float = 0.0,
) -> Sequential:
    """Fully connected layers with ReLU between them.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Any shape: samples are flattened.
    hidden : sequence of int
        Features of each hidden layer.
    dropout : float
        Rate after each hidden layer.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.
    """
    parts: list[Net] = [Flatten(name="flatten")]
    for i, features in enumerate(hidden, start=1):
        parts += [Linear(features, initializer="he_normal", name=f"fc{i}"), ReLU(name=f"relu{i}")]
        if dropout:
            parts.append(Dropout(dropout, name=f"dropout{i}"))
    return Sequential(*parts, Linear(classes, name=f"fc{len(hidden) + 1}"))
