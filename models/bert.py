"""BERT: an encoder of text that fills in masked tokens, or classifies sequences."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from pydtnn.layers import (
    GELU,
    Add,
    Block,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    Net,
    PositionalEmbedding,
    Rescale,
    Sequential,
    Slice,
    Tanh,
)
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.initializers import Normal
from pydtnn.layers.node import Node
from pydtnn.models.gpt import DEVIATION
from pydtnn.models.transformer import BlockStack, dropouts, encoder_block
from pydtnn.utils.validate import check_int

EPSILON = 1e-12
"""Of layer norms, as in the published code."""


class Bert(Block):
    """Vectors of tokens and segments, an encoder, and a head.

    Parameters
    ----------
    token, segment : Layer
        Embeddings.
    encoder : BlockStack
    head : Layer or Block
    """

    def __init__(self, token: Net, segment: Net, encoder: BlockStack, head: Net) -> None:
        super().__init__()
        self.token, self.segment, self.encoder, self.head = token, segment, encoder, head

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the parts; without segments as an input, all tokens are of segment 0."""
        tokens, *others = inputs
        first = graph.add(self.token, tokens)  # before all others that read tokens
        segments = others[1] if others[1:] else graph.add(Rescale(0.0, name="segments"), tokens)
        vectors = first, graph.add(self.segment, segments)
        x = graph.add(Add(name="embedding"), *cast(tuple[Node, ...], vectors))
        y = cast(Node, graph.add(self.encoder, x, *others[:1]))
        return cast(Node, graph.add(self.head, y))


def bert(
    classes: int,
    input_shape: Any,
    *,
    tokens: int | None = None,
    segments: int = 2,
    depth: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    tied: bool = True,
) -> Bert:
    """Embeddings of tokens, positions and segments, blocks with norms after the sums, a head.

    Parameters
    ----------
    classes : int
        Number of different tokens K, or classes of sequences if `tokens` is given.
    input_shape : tuple of int, or tuple of such tuples
        ``(T,)``: tokens; or further ``(1,)``, the lengths of samples, or ``(T,)``, the document of
        each position (see `pydtnn.layers.DotProductAttention`); and further ``(T,)``, the segment
        of each position.
    tokens : int, optional
        Number of different tokens of sequences that are classified.
    segments : int
        Number of different segments.
    depth, heads, width : int
        Number of blocks, heads of each, and features of a position.
    dropout, attention_dropout : float
        Rates after embeddings and layers, and of attention weights.
    tied : bool
        Whether logits of masked tokens have the matrix of the embedding, or one of their own.

    Returns
    -------
    Bert
        Gives logits ``(N, T, K)`` of masked tokens, by a linear layer, GELU, a norm and the matrix
        of the token embedding if they are `tied`; with `tokens` logits ``(N, K)`` of classes, from
        the first position by a linear layer and tanh.

    Raises
    ------
    ValueError
        If the inputs are others.

    References
    ----------
    Devlin et al., "BERT: pre-training of deep bidirectional transformers for language
    understanding", NAACL 2019, sections 3 and 4. Turc et al., "Well-read students learn better",
    2019 (`bert_small`).
    """
    several = bool(input_shape) and isinstance(input_shape[0], tuple)
    shapes = tuple(input_shape) if several else (input_shape,)
    if (
        len(shapes[0]) != 1
        or shapes[1:2] not in ((), ((1,),), shapes[:1])
        or shapes[2:] not in ((), shapes[:1])
    ):
        raise ValueError(
            "bert: expected tokens (T,), lengths (1,) or documents (T,) if any, and segments (T,) "
            f"if any, got {' and '.join(map(str, shapes))}; use --dataset masked_text, or another "
            "network for images"
        )
    check_int("bert", "depth", depth, at_least=1)
    usual = Normal(DEVIATION)
    vocabulary = classes if tokens is None else check_int("bert", "tokens", tokens, at_least=1)
    masked = tokens is None
    tied = tied and masked
    token = Embedding(vocabulary, width, initializer=usual, tied=tied, bias=tied, name="token")
    linear = partial(Linear, initializer=usual)
    norm = partial(LayerNorm, epsilon=EPSILON)
    encoder = BlockStack(
        (
            PositionalEmbedding(initializer=usual, name="position"),
            norm(name="norm"),
            *dropouts(dropout, "dropout"),
        ),
        [
            encoder_block(
                width,
                heads,
                norm=norm,
                norm_first=False,
                activation=partial(GELU, "none", name="gelu"),
                dropout=dropout,
                attention_dropout=attention_dropout,
                initializer=usual,
                name=f"block{i}",
            )
            for i in range(depth)
        ],
        name="encoder",
    )
    fill = (linear(width, name="transform"), GELU("none", name="gelu"), norm(name="norm"))
    classify = (
        Slice(slice(0, 1), name="slice"),
        Flatten(name="flatten"),
        linear(width, name="pooler"),
        Tanh(name="tanh"),
        *([Dropout(dropout, name="dropout")] if dropout else []),
        linear(classes, name="logits"),
    )
    last = token if tied else linear(classes, name="logits")
    head = Sequential(*((*fill, last) if masked else classify), name="head")
    return Bert(token, Embedding(segments, width, initializer=usual, name="segment"), encoder, head)


bert_base = bert
bert_small = partial(bert, depth=4, heads=8, width=512)
bert_nano = partial(bert, depth=2, heads=2, width=32)
