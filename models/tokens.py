"""What the networks for text ask of their input."""

from __future__ import annotations


def check_tokens(who: str, input_shape: tuple[int, ...]) -> None:
    """Raise ValueError if samples are not sequences of tokens."""
    if len(input_shape) != 1:
        raise ValueError(
            f"{who}: expected sequences of tokens, of shape (T,), got {tuple(input_shape)}; use "
            "--dataset text, or another network for images"
        )
