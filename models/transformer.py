"""The block of a transformer."""

from __future__ import annotations

from typing import Literal

from pydtnn.layers import (
    GELU,
    Dropout,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Net,
    Residual,
    Sequential,
)
from pydtnn.layers.initializers import Initializer

USUAL = "glorot_uniform"
"""Initializer of matrices."""


def block(
    width: int,
    heads: int,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    epsilon: float = 1e-5,
    approximate: Literal["tanh", "none"] = "tanh",
    experts: Net | None = None,
    initializer: str | Initializer = USUAL,
    last_initializer: str | Initializer = USUAL,
    name: str,
) -> Net:
    """Attention and an MLP of four times the width, each after a layer norm and added to its input.

    Parameters
    ----------
    width : int
        Features of a position.
    heads : int
        Must divide `width`.
    causal : bool
        Whether a position does not depend on the positions after it.
    dropout, attention_dropout : float
        Rate after attention and each layer of the MLP, and of attention weights.
    epsilon : float
        Of the norms.
    approximate : {"tanh", "none"}
        Of GELU.
    experts : Net, optional
        Instead of the layers of the MLP.
    initializer, last_initializer : str or Initializer
        Of matrices, and of those whose products are added to the input.
    name : str

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3. Radford et al., "Language
    models are unsupervised multitask learners", 2019, section 2.3, for norms before the layers.
    """
    attention = Sequential(
        LayerNorm(epsilon=epsilon, name="norm1"),
        MultiHeadAttention(
            heads,
            causal=causal,
            dropout=attention_dropout,
            initializer=initializer,
            output_initializer=last_initializer,
            name="attention",
        ),
        *dropouts(dropout, "dropout1"),
        name="",
    )
    layers = (
        Linear(4 * width, initializer=initializer, name="fc1"),
        GELU(approximate, name="gelu"),
        *dropouts(dropout, "dropout2"),
        Linear(width, initializer=last_initializer, name="fc2"),
    )
    mlp = Sequential(
        LayerNorm(epsilon=epsilon, name="norm2"),
        *(layers if experts is None else (experts,)),
        *dropouts(dropout, "dropout3"),
        name="",
    )
    return Sequential(Residual(attention, name=""), Residual(mlp, name=""), name=name)


def dropouts(rate: float, name: str) -> list[Net]:
    """Return a dropout layer, or none if the rate is 0."""
    return [Dropout(rate, name=name)] if rate else []
