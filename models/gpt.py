"""GPT: transformer blocks that predict each token of a sequence from those before it."""

from __future__ import annotations

from functools import partial
from math import sqrt

from pydtnn.layers import (
    Block,
    Embedding,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    PositionalEmbedding,
    Sequential,
)
from pydtnn.layers.initializers import Normal
from pydtnn.models.tokens import check_tokens, with_documents
from pydtnn.models.transformer import block, dropouts
from pydtnn.utils.validate import check_int

DEVIATION = 0.02
"""Standard deviation of initial weights."""


def gpt(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    depth: int = 6,
    heads: int = 6,
    width: int = 384,
    dropout: float = 0.0,
    tied: bool = True,
    experts: int = 0,
    choices: int = 2,
    capacity: float | None = None,
    balance: float = 0.01,
    z: float = 0.001,
) -> Block:
    """Token and positional embeddings, blocks of causal attention and an MLP, logits.

    The matrix of the logits is that of the token embedding if `tied`. Initial weights are normal
    with a deviation of 0.02, which is divided by the square root of the number of sums where the
    result of a layer is added to its input.

    Parameters
    ----------
    classes : int
        Number of different tokens K.
    input_shape : tuple of int
        ``(T,)``, the length of a sequence; ``((T,), (T,))`` for tokens and the document of each,
        0 where there is none, as those of `pydtnn.data.PackedDataset`.
    depth, heads, width : int
        Number of blocks, heads of each, and features of a position, which `heads` divides.
    dropout : float
        Rate after the embeddings, of attention weights and after each layer of a block.
    tied : bool
        If not, the logits have a matrix of their own, so that a pipeline can cut the network.
    experts : int
        Experts of each block, instead of its MLP; 0: none.
    choices, capacity, balance, z
        Of the experts: `pydtnn.layers.Experts`.

    Returns
    -------
    Block
        Gives logits ``(N, T, K)`` of the next token at each position, from tokens ``(N, T)``.

    Raises
    ------
    ValueError
        If the input is not a sequence of tokens.

    References
    ----------
    Radford et al., "Language models are unsupervised multitask learners" (GPT-2), 2019, section
    2.3. Press and Wolf, "Using the output embedding to improve language models", EACL 2017.
    """
    check_tokens("gpt", input_shape, documents=True)
    check_int("gpt", "depth", depth, at_least=1)
    check_int("gpt", "experts", experts, at_least=0)
    usual, last = Normal(DEVIATION), Normal(DEVIATION / sqrt(2 * depth))
    mixture = partial(
        MixtureOfExperts,
        experts,
        4 * width,
        choices=choices,
        capacity=capacity,
        balance=balance,
        z=z,
        initializer=usual,
        last_initializer=last,
        name="moe",
    )
    embedding = Embedding(classes, width, initializer=usual, tied=tied, name="token")
    own = Linear(classes, bias=False, initializer=usual, name="logits")
    net = Sequential(
        embedding,
        PositionalEmbedding(name="position"),
        *dropouts(dropout, "dropout"),
        *(
            block(
                width,
                heads,
                causal=True,
                dropout=dropout,
                attention_dropout=dropout,
                experts=mixture() if experts else None,
                initializer=usual,
                last_initializer=last,
                name=f"block{i}",
            )
            for i in range(depth)
        ),
        LayerNorm(name="norm"),
        embedding if tied else own,
    )
    return with_documents(net, input_shape)


gpt_nano = partial(gpt, depth=3, heads=3, width=48)
gpt2_small = partial(gpt, depth=12, heads=12, width=768)
moe_gpt = partial(gpt, experts=8)
moe_gpt_nano = partial(gpt_nano, experts=4)
