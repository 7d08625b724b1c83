"""Vision transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydtnn.layers import (
    ClassToken,
    Conv2d,
    Flatten,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    Reshape,
    Sequential,
    Slice,
)
from pydtnn.models.images import image_size, is_small
from pydtnn.models.transformer import block, dropouts
from pydtnn.utils.validate import check_int

EPSILON = 1e-6
"""Of layer norms, as in the published code."""


def vit(
    width: int,
    depth: int,
    heads: int,
    classes: int,
    input_shape: tuple[int, ...],
    *,
    patch: int | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> Sequential:
    """Patches of an image as a sequence, blocks of attention and an MLP, a class token.

    Layer norms come first in each block, and GELU is exact.

    Parameters
    ----------
    width : int
        Features of a position; the MLPs have four times as many.
    depth : int
        Blocks.
    heads : int
        Must divide `width`.
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` with multiples of `patch` as sides.
    patch : int, optional
        Side of a patch, in pixels; by default 16, and 4 for images below 64 x 64.
    dropout : float
        Rate after the positional embedding and after each layer of an MLP and each attention.
    attention_dropout : float
        Rate of dropped attention weights.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        If patches do not fit into the image, or heads into the width.

    References
    ----------
    Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, section 3.1 and table 1. Touvron
    et al., "Training data-efficient image transformers", ICML 2021, table 1, for the small and the
    tiny one.
    """
    if patch is None:
        patch = 4 if len(input_shape) == 3 and is_small(input_shape) else 16
    patch = check_int("vit", "patch", patch, at_least=1)
    height, columns = image_size("vit", input_shape, at_least=patch)
    if height % patch or columns % patch:
        raise ValueError(
            f"vit: the sides of images must be multiples of patch={patch}, got {height} x {columns}"
        )
    embedding = Sequential(
        Conv2d(width, patch, stride=patch, initializer="lecun_normal", name="conv"),
        Reshape((-1, width), name="reshape"),
        ClassToken(name="class"),
        PositionalEmbedding(name="position"),
        *dropouts(dropout, "dropout"),
        name="embedding",
    )
    options: dict[str, Any] = {
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "epsilon": EPSILON,
        "approximate": "none",
    }
    blocks = (block(width, heads, name=f"block{i}", **options) for i in range(depth))
    head = Sequential(
        Slice(slice(0, 1), name="slice"),  # the class token; norms are those of single positions
        Flatten(name="flatten"),
        LayerNorm(epsilon=EPSILON, name="norm"),
        Linear(classes, name="fc"),
        name="head",
    )
    return Sequential(embedding, *blocks, head)


vit_tiny = partial(vit, 192, 12, 3)
vit_small = partial(vit, 384, 12, 6)
vit_b16 = partial(vit, 768, 12, 12)
