"""GPT: a decoder of transformer blocks that predicts each token from those before it."""

from __future__ import annotations

from functools import partial
from math import sqrt

from pydtnn.layers import (
    GELU,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Net,
    PositionalEmbedding,
    Residual,
    Sequential,
)
from pydtnn.layers.initializers import Normal

DEVIATION = 0.02
"""Standard deviation of initial weights."""


def gpt(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    layers: int = 6,
    heads: int = 6,
    features: int = 384,
    dropout: float = 0.0,
) -> Sequential:
    """Token and positional embeddings, blocks of causal attention and two linear layers, logits.

    Norms precede attention and linear layers, and the matrix of the logits is that of the
    embedding, as in GPT-2. Initial weights are normal with a deviation of 0.02, divided by the
    square root of the number of residual additions where a block adds its result.

    Parameters
    ----------
    classes : int
        Number of different tokens K.
    input_shape : tuple of int
        ``(T,)``, the length of a sequence.
    layers, heads, features : int
        Number of blocks, heads of each, and length D of a token's vector, which `heads` divides.
    dropout : float
        Rate after the embeddings, of attention weights and of each block's results.

    Returns
    -------
    Sequential
        Gives logits ``(N, T, K)`` of the next token at each position, from tokens ``(N, T)``.

    Raises
    ------
    ValueError
        If the input is not a sequence, or a number is out of range.

    References
    ----------
    Radford et al., "Language models are unsupervised multitask learners" (GPT-2), 2019, section
    2.3. Press and Wolf, "Using the output embedding to improve language models", EACL 2017.
    """
    if len(input_shape) != 1:
        raise ValueError(
            f"gpt: expected sequences of tokens, of shape (T,), got {tuple(input_shape)}; use "
            "--dataset text, or another network for images"
        )
    embedding = Embedding(classes, features, initializer=Normal(DEVIATION), tied=True)
    return Sequential(
        embedding,
        PositionalEmbedding(),
        *_dropout(dropout),
        *(
            _block(features, heads, dropout, Normal(DEVIATION / sqrt(2 * layers)))
            for _ in range(layers)
        ),
        LayerNorm(),
        embedding,
    )


def _block(features: int, heads: int, dropout: float, last: Normal) -> Net:
    attention = MultiHeadAttention(heads, causal=True, dropout=dropout)
    linear = (
        Linear(4 * features, initializer=Normal(DEVIATION)),
        GELU(),
        Linear(features, initializer=last),
    )
    return Sequential(
        Residual(Sequential(LayerNorm(), attention, *_dropout(dropout))),
        Residual(Sequential(LayerNorm(), *linear, *_dropout(dropout))),
    )


def _dropout(rate: float) -> list[Dropout]:
    return [Dropout(rate)] if rate else []


gpt_nano = partial(gpt, layers=3, heads=3, features=48)
gpt2_small = partial(gpt, layers=12, heads=12, features=768)
