"""T5: an encoder and a decoder with relative positions, without biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

from pydtnn.layers import (
    GELU,
    Embedding,
    Linear,
    Net,
    RelativePositions,
    ReLU,
    Rescale,
    RMSNorm,
    Sequential,
)
from pydtnn.layers.initializers import Normal
from pydtnn.models.transformer import (
    BlockStack,
    EncoderDecoder,
    check_pairs,
    decoder_block,
    dropouts,
    encoder_block,
)
from pydtnn.utils.validate import check_int


def t5(
    classes: int,
    input_shape: Any,
    *,
    depth: int = 6,
    heads: int = 8,
    width: int = 512,
    hidden: int | None = None,
    gated: bool = False,
    buckets: int = 32,
    distance: int = 128,
    epsilon: float = 1e-6,
    dropout: float = 0.1,
    tied: bool = True,
) -> EncoderDecoder:
    """An encoder and a decoder with RMS norms first; products of queries and keys are not scaled.

    Parameters
    ----------
    classes : int
        Number of different tokens K.
    input_shape : tuple of tuple of int
        Those of `pydtnn.models.transformer`.
    depth, heads, width : int
        Blocks of encoder and of decoder, heads of each, features of a position.
    hidden : int, optional
        Features of an MLP; by default four times the width.
    gated : bool
        Whether MLPs are gated with GELU, as in version 1.1; otherwise they have ReLU.
    buckets, distance : int
        Of `pydtnn.layers.RelativePositions`, of which each attention has its own.
    epsilon : float
        Of the norms.
    dropout : float
        Rate after embeddings, layers, activations and norms behind all blocks, and of attention
        weights.
    tied : bool
        Whether logits have the matrix of the embedding, and their input is divided by the square
        root of the width; otherwise they have one of their own, as in version 1.1.

    Returns
    -------
    EncoderDecoder
        Gives logits ``(N, T2, K)``.

    Raises
    ------
    ValueError
        If the inputs are others.

    References
    ----------
    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
    transformer", JMLR 2020, section 2.1. Shazeer, "GLU variants improve transformer", 2020.
    """
    check_pairs("t5", input_shape)
    check_int("t5", "depth", depth, at_least=1)
    usual = Normal(1 / sqrt(width))

    def stack(make: Callable[..., Net], name: str) -> BlockStack:
        def block(i: int) -> Net:
            return make(
                width,
                heads,
                hidden=hidden,
                norm=partial(RMSNorm, epsilon=epsilon),
                activation=partial(GELU, "tanh", name="act")
                if gated
                else partial(ReLU, name="act"),
                gated=gated,
                bias=False,
                positions=RelativePositions(buckets, distance, bidirectional=name == "encoder"),
                scale=1.0,
                dropout=dropout,
                attention_dropout=dropout,
                hidden_dropout=dropout,
                initializer=usual,
                name=f"block{i}",
            )

        return BlockStack(
            dropouts(dropout, "first_dropout"),
            [block(i) for i in range(depth)],
            (RMSNorm(epsilon=epsilon, name="norm"), *dropouts(dropout, "last_dropout")),
            name=name,
        )

    embedding = Embedding(classes, width, initializer=Normal(1.0), tied=tied, name="token")
    own = Linear(classes, bias=False, initializer=usual, name="logits")
    head = Sequential(Rescale(1 / sqrt(width), name="scale"), embedding, name="") if tied else own
    return EncoderDecoder(
        embedding, stack(encoder_block, "encoder"), stack(decoder_block, "decoder"), head
    )


t5_small = t5
t5_nano = partial(t5, depth=2, heads=2, width=32, dropout=0.0)
