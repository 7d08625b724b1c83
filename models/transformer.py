"""The blocks of transformers, and the encoder and decoder with which they began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any, Literal, cast

import numpy as np

from pydtnn.layers import (
    GELU,
    Add,
    Block,
    Branches,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    MultiHeadCrossAttention,
    Multiply,
    Net,
    PositionalEmbedding,
    ReLU,
    Rescale,
    Residual,
    Sequential,
)
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.initializers import Initializer, Normal
from pydtnn.layers.node import Node
from pydtnn.utils.validate import check_int

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


class Added(Block):
    """A layer that is added to its first input, with a norm before it or after the sum.

    ``y = x + dropout(layer(norm(x), ...))``, or ``norm(x + dropout(layer(x, ...)))``.

    Parameters
    ----------
    layer, norm : Layer or Block
    norm_first : bool
    dropout : float
        Rate after the layer.
    number : int
        Part of the name of the dropout.

    References
    ----------
    Xiong et al., "On layer normalization in the transformer architecture", ICML 2020.
    """

    def __init__(
        self, layer: Net, norm: Net, *, norm_first: bool, dropout: float = 0.0, number: int = 1
    ) -> None:
        super().__init__(name="")
        self.layer, self.norm, self.norm_first = layer, norm, norm_first
        self.dropouts = dropouts(dropout, f"dropout{number}")

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the norm and the layer, which has the other inputs, too."""
        x, *others = inputs
        y = cast(Node, graph.add(self.norm, x)) if self.norm_first else x
        for part, more in ((self.layer, others), *((part, []) for part in self.dropouts)):
            y = cast(Node, graph.add(part, y, *more))
        y = graph.add(Add(), y, x, label="add")
        return y if self.norm_first else cast(Node, graph.add(self.norm, y))


class TransformerBlock(Block):
    """Attention of a sequence to itself, perhaps to another one, and an MLP, each one `Added`.

    Parameters
    ----------
    attention, mlp : Added
    cross : Added, optional
        Attention to another sequence.
    name : str

    Notes
    -----
    Inputs: the sequence ``(N, T, D)``, and lengths or documents if any, see `DotProductAttention`;
    with `cross` the sequence, the other one ``(N, T2, D)``, and the lengths of the latter.
    """

    def __init__(self, attention: Net, mlp: Net, cross: Net | None = None, *, name: str) -> None:
        super().__init__(name=name)
        self.attention, self.mlp, self.cross = attention, mlp, cross

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the parts in their order."""
        x, *others = inputs
        x = cast(Node, graph.add(self.attention, x, *([] if self.cross else others)))
        if self.cross is not None:
            x = cast(Node, graph.add(self.cross, x, *others))
        return cast(Node, graph.add(self.mlp, x))


def encoder_block(
    width: int,
    heads: int,
    *,
    hidden: int | None = None,
    cross: bool = False,
    causal: bool = False,
    norm: Callable[..., Net] = LayerNorm,
    norm_first: bool = True,
    activation: Callable[[], Net] = ReLU,
    gated: bool = False,
    bias: bool = True,
    positions: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    initializer: str | Initializer = USUAL,
    name: str,
) -> TransformerBlock:
    """Attention and an MLP, each with a norm and added to its input; see `TransformerBlock`.

    Parameters
    ----------
    width, heads : int
        Features of a position, and heads, which must divide them.
    hidden : int, optional
        Features of the MLP; by default four times the width.
    cross : bool
        Whether there is attention to another sequence, between the other two.
    causal : bool
        Whether a position does not depend on the positions after it.
    norm : callable
        Returns a norm for `name`.
    norm_first : bool
        Whether norms are before the layers, or after the sums.
    activation : callable
        Returns the activation of the MLP.
    gated : bool
        Whether it is multiplied by another projection (Shazeer, "GLU variants improve
        transformer", 2020).
    bias : bool
        Whether linear layers have biases.
    positions, scale
        Of attention, the former not of that to another sequence; see `DotProductAttention`.
    dropout, attention_dropout, hidden_dropout : float
        Rates after the layers, of attention weights, and after the activation.
    initializer : str or Initializer
        Of matrices.
    name : str
    """
    added = partial(Added, norm_first=norm_first, dropout=dropout)
    attention: dict[str, Any] = {
        **{"bias": bias, "scale": scale, "dropout": attention_dropout},
        **{"initializer": initializer, "output_initializer": initializer},
    }
    own = MultiHeadAttention(
        heads, causal=causal, positions=positions, **attention, name="attention"
    )
    other = MultiHeadCrossAttention(heads, **attention, name="cross")
    last = 3 if cross else 2

    def linear(features: int, name: str) -> Linear:
        return Linear(features, bias=bias, initializer=initializer, name=name)

    first: Sequence[Net] = (linear(hidden or 4 * width, "fc1"), activation())
    if gated:
        other_projection = linear(hidden or 4 * width, "gate")
        merge = Multiply(name="gated")
        first = (Branches(Sequential(*first, name=""), other_projection, merge=merge, name=""),)
    between = dropouts(hidden_dropout, "dropout")
    mlp = Sequential(*first, *between, linear(width, "fc2"), name="")
    return TransformerBlock(
        added(own, norm(name="norm1")),
        added(mlp, norm(name=f"norm{last}"), number=last),
        added(other, norm(name="norm2"), number=2) if cross else None,
        name=name,
    )


decoder_block = partial(encoder_block, causal=True, cross=True)
"""The same with causal attention, and attention to another sequence."""


class BlockStack(Block):
    """Parts of which the first and the last have one input, and all blocks the others, too.

    Parameters
    ----------
    first, last : sequence of Layer or Block
    blocks : sequence of Layer or Block
    name : str
    """

    def __init__(
        self, first: Sequence[Net], blocks: Sequence[Net], last: Sequence[Net] = (), *, name: str
    ) -> None:
        super().__init__(name=name)
        self.parts = (first, blocks, last)

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect each part to the one before."""
        x, *others = inputs
        for parts, more in zip(self.parts, ([], others, []), strict=True):
            for part in parts:
                x = cast(Node, graph.add(part, x, *more))
        return x


class EncoderDecoder(Block):
    """Logits of each token of a sequence from those before it, and another sequence.

    Parameters
    ----------
    embedding : Embedding
        Of the tokens of both.
    encoder, decoder : BlockStack
    head : Layer or Block
        Computes logits.

    Notes
    -----
    Inputs: tokens ``(N, T1)`` of the source and ``(N, T2)`` of the target, each one step later, and
    the lengths ``(N, 1)`` of the source if they differ. Output ``(N, T2, K)``.
    """

    def __init__(self, embedding: Net, encoder: BlockStack, decoder: BlockStack, head: Net) -> None:
        super().__init__()
        self.embedding, self.encoder, self.decoder = embedding, encoder, decoder
        self.head = head

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the encoder, and the decoder to its output."""
        source, target, *lengths = inputs
        vectors = [cast(Node, graph.add(self.embedding, x)) for x in (source, target)]
        memory = graph.add(self.encoder, vectors[0], *lengths)
        y = graph.add(self.decoder, vectors[1], cast(Node, memory), *lengths)
        return cast(Node, graph.add(self.head, cast(Node, y)))


def sinusoids(
    shape: tuple[int, ...], fan_in: int, fan_out: int, rng: np.random.Generator
) -> np.ndarray:
    """Return sines and cosines of positions, an initializer of ``(T, D)``.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.5.
    """
    length, features = shape
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, features, 2) / features)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, -1)[:, :features]


def transformer(
    classes: int,
    input_shape: Any,
    *,
    depth: int = 6,
    heads: int = 8,
    width: int = 512,
    hidden: int | None = None,
    dropout: float = 0.1,
    norm_first: bool = False,
    positions: Literal["sinusoids", "learned"] = "sinusoids",
    tied: bool = True,
) -> EncoderDecoder:
    """An encoder of a sequence and a decoder of another, as for translation.

    Parameters
    ----------
    classes : int
        Number of different tokens K, of both sequences.
    input_shape : tuple of tuple of int
        ``((T1,), (T2,))``: tokens of the source and of the target, the latter one step later; and
        perhaps ``(1,)``, the lengths of the source. See `EncoderDecoder`.
    depth, heads, width : int
        Blocks of encoder and of decoder, heads of each, features of a position.
    hidden : int, optional
        Features of an MLP; by default four times the width.
    dropout : float
        Rate after embeddings and each layer of a block.
    norm_first : bool
        Whether norms are before the layers of a block, with one more behind all blocks.
    positions : {"sinusoids", "learned"}
        Initial values of the vectors of positions, sines or normally distributed. Sines are trained
        as well, unless the layers ``encoder.position`` and ``decoder.position`` are frozen.
    tied : bool
        Whether logits have the matrix of the embedding, or one of their own.

    Returns
    -------
    EncoderDecoder

    Raises
    ------
    ValueError
        If the inputs are others.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3 and table 3.
    """
    check_pairs("transformer", input_shape)
    check_int("transformer", "depth", depth, at_least=1)
    if positions not in ("sinusoids", "learned"):
        raise ValueError(f"transformer: positions must be sinusoids or learned, got {positions!r}")
    initializer = sinusoids if positions == "sinusoids" else Normal(1.0)

    def stack(make: Callable[..., Net], name: str) -> BlockStack:
        options = {"hidden": hidden, "norm_first": norm_first, "dropout": dropout}
        return BlockStack(
            (
                Rescale(sqrt(width), name="scale"),
                PositionalEmbedding(initializer=initializer, name="position"),
                *dropouts(dropout, "dropout"),
            ),
            [make(width, heads, **options, name=f"block{i}") for i in range(depth)],
            [LayerNorm(name="norm")] if norm_first else [],
            name=name,
        )

    embedding = Embedding(classes, width, initializer=Normal(width**-0.5), tied=tied, name="token")
    own = Linear(classes, bias=False, name="logits")
    return EncoderDecoder(
        embedding,
        stack(encoder_block, "encoder"),
        stack(decoder_block, "decoder"),
        embedding if tied else own,
    )


def check_pairs(who: str, input_shape: Any) -> None:
    """Raise ValueError if samples are not pairs of sequences of tokens, with lengths if any."""
    shapes = input_shape if input_shape and isinstance(input_shape[0], tuple) else (input_shape,)
    if (
        len(shapes) not in (2, 3)
        or any(len(s) != 1 for s in shapes)
        or shapes[2:]
        not in (
            (),
            ((1,),),
        )
    ):
        raise ValueError(
            f"{who}: expected tokens of a source (T1,) and of a target (T2,), and lengths (1,) if "
            f"any, got {' and '.join(map(str, shapes))}; use --dataset reversal, or another network"
        )


transformer_base = transformer
transformer_nano = partial(transformer, depth=2, heads=2, width=32, dropout=0.0)
