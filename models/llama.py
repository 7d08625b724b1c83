"""Llama: a GPT with rotary positions, groups of heads that share keys, and gated layers."""

from __future__ import annotations

from functools import partial
from math import sqrt

from pydtnn.layers import (
    Block,
    Branches,
    DotProductAttention,
    Embedding,
    Linear,
    MixtureOfExperts,
    Multiply,
    Net,
    Residual,
    RMSNorm,
    Rotary,
    Sequential,
    SiLU,
)
from pydtnn.layers.initializers import Normal
from pydtnn.models.gpt import DEVIATION
from pydtnn.models.tokens import check_tokens, with_documents
from pydtnn.utils.validate import check_int


def llama(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    depth: int = 6,
    heads: int = 6,
    groups: int = 2,
    width: int = 384,
    hidden: int | None = None,
    base: float = 10000.0,
    epsilon: float = 1e-5,
    tied: bool = True,
    experts: int = 0,
    choices: int = 2,
    capacity: float | None = None,
    balance: float = 0.01,
    z: float = 0.001,
) -> Block:
    """Token embeddings, blocks of causal attention and a gated MLP, logits; without biases.

    Initial weights are those of `gpt`.

    Parameters
    ----------
    classes : int
        Number of different tokens K.
    input_shape : tuple of int
        ``(T,)``, the length of a sequence; ``((T,), (T,))`` for tokens and the document of each,
        0 where there is none, as those of `pydtnn.data.PackedDataset`.
    depth, heads, width : int
        Number of blocks, heads of each, and features of a position, which twice `heads` divides.
    groups : int
        Keys and values of a position, each of which ``heads / groups`` heads share.
    hidden : int, optional
        Features of the MLP; by default 8 / 3 of the width, with as many weights as one of `gpt`.
    base : float
        Of the angles of `pydtnn.layers.Rotary`.
    epsilon : float
        Of the norms.
    tied : bool
        If not, the logits have a matrix of their own, so that a pipeline can cut the network.
    experts : int
        Experts of each block, each a gated MLP, as in Mixtral; 0: one MLP for all tokens.
    choices, capacity, balance, z
        Of the experts: `pydtnn.layers.Experts`.

    Returns
    -------
    Block
        Gives logits ``(N, T, K)`` of the next token at each position, from tokens ``(N, T)``.

    Raises
    ------
    ValueError
        If the input is not a sequence of tokens, or heads, groups and width do not divide.

    References
    ----------
    Touvron et al., "LLaMA: open and efficient foundation language models", 2023, section 2.2.
    Shazeer, "GLU variants improve transformer", 2020, equation 6 (SwiGLU). Ainslie et al., "GQA:
    training generalized multi-query transformer models from multi-head checkpoints", EMNLP 2023.
    Jiang et al., "Mixtral of experts", 2024, section 2.1 (`experts`).
    """
    check_tokens("llama", input_shape, documents=True)
    check_int("llama", "depth", depth, at_least=1)
    check_int("llama", "experts", experts, at_least=0)
    check_int("llama", "heads", heads, at_least=1)
    check_int("llama", "groups", groups, at_least=1)
    if width % (2 * heads) or heads % groups:
        raise ValueError(
            f"llama: twice the heads must divide the width, and groups the heads, got {heads} "
            f"heads, a width of {width} and {groups} groups"
        )
    usual, last = Normal(DEVIATION), Normal(DEVIATION / sqrt(2 * depth))
    hidden = 8 * width // 3 if hidden is None else hidden

    def linear(features: int, name: str) -> Linear:
        return Linear(features, bias=False, initializer=usual, name=name)

    def added(features: int, name: str) -> Linear:
        return Linear(features, bias=False, initializer=last, name=name)

    def block(name: str) -> Net:
        attention = Sequential(
            Branches(
                linear(width, "q_proj"),
                linear(width // heads * groups, "k_proj"),
                linear(width // heads * groups, "v_proj"),
                merge=Rotary(heads, base=base, name="rotary"),
                name="",
            ),
            DotProductAttention(heads, causal=True, name="attention"),
            added(width, "o_proj"),
            name="attention",
        )
        gate = Sequential(linear(hidden, "gate_proj"), SiLU(name="silu"), name="")
        mlp: Net = Sequential(
            Branches(gate, linear(hidden, "up_proj"), merge=Multiply(name="gated"), name=""),
            added(width, "down_proj"),
            name="mlp",
        )
        if experts:
            mlp = MixtureOfExperts(
                experts,
                hidden,
                choices=choices,
                capacity=capacity,
                gated=True,
                balance=balance,
                z=z,
                initializer=usual,
                last_initializer=last,
                name="moe",
            )
        return Sequential(
            Residual(
                Sequential(RMSNorm(epsilon=epsilon, name="norm1"), attention, name=""), name=""
            ),
            Residual(Sequential(RMSNorm(epsilon=epsilon, name="norm2"), mlp, name=""), name=""),
            name=name,
        )

    embedding = Embedding(classes, width, initializer=usual, tied=tied, name="token")
    net = Sequential(
        embedding,
        *(block(f"block{i}") for i in range(depth)),
        RMSNorm(epsilon=epsilon, name="norm"),
        embedding if tied else linear(classes, "logits"),
    )
    return with_documents(net, input_shape)


llama_nano = partial(llama, depth=3, heads=4, width=48)
