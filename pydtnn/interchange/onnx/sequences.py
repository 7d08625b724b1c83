"""Layers of sequences as operators of ONNX: tokens, positions, attention.

Sequences are (N, T, C) in both.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from pydtnn.interchange.onnx.draft import Draft
from pydtnn.interchange.onnx.place import Place


def positions(draft: Draft, at: Place) -> None:
    """Write `Linear` of each position: a product with (C, O), and the bias."""
    matrix = draft.constant(f"{at.name}.weight", at.arrays["weight"].T)
    if "bias" not in at.arrays:
        draft.node("MatMul", [*at.inputs, matrix], at.output, name=at.name)
        return
    product = draft.node("MatMul", [*at.inputs, matrix], f"{at.name}.product")
    bias = draft.constant(f"{at.name}.bias", at.arrays["bias"])
    draft.node("Add", [product, bias], at.output, name=at.name)


def embedding(draft: Draft, at: Place) -> None:
    """Write rows of the matrix (K, C), or if the layer computes logits a product with (C, K)."""
    matrix = draft.constant(f"{at.source}.weight", at.arrays["weight"])
    if at.layer.tied and at.source != at.name:
        columns = draft.node("Transpose", [matrix], f"{at.name}.columns", perm=[1, 0])
        draft.node("MatMul", [*at.inputs, columns], at.name)
        return
    integer = draft.helper.np_dtype_to_tensor_dtype(np.dtype("int64"))
    tokens = draft.node("Cast", at.inputs, f"{at.name}.tokens", to=integer)
    draft.node("Gather", [matrix, tokens], at.name)


def positional_embedding(draft: Draft, at: Place) -> None:
    """Write the sum with a constant (T, C)."""
    constant = draft.constant(f"{at.name}.weight", at.arrays["weight"])
    draft.node("Add", [*at.inputs, constant], at.name)


def class_token(draft: Draft, at: Place) -> None:
    """Write the token (N, 1, C), with N of the input, before the sequence."""
    (x,), name = at.inputs, at.name
    token = draft.constant(f"{name}.token", at.arrays["token"].reshape(1, 1, -1))
    size = draft.node("Shape", [x], f"{name}.size", start=0, end=1)
    others = draft.constant(f"{name}.others", [1, at.shape[-1]])
    shape = draft.node("Concat", [size, others], f"{name}.shape", axis=0)
    tokens = draft.node("Expand", [token, shape], f"{name}.tokens")
    draft.node("Concat", [tokens, x], name, axis=1)


def attention(draft: Draft, at: Place) -> None:
    """Write ``softmax(q k' / sqrt(E) + mask) v`` of heads (N, heads, T, E)."""
    at.require(len(at.inputs) == 1, "one input, without lengths")
    (x,), name, heads = at.inputs, at.name, at.layer.heads
    length, features = at.shape
    size = features // heads
    split = draft.constant(f"{name}.split", [0, length, 3, heads, size])
    parts = draft.node("Reshape", [x, split], f"{name}.parts")
    parts = draft.node("Transpose", [parts], f"{name}.heads", perm=[2, 0, 3, 1, 4])
    q, k, v = [
        draft.node("Gather", [parts, draft.constant(f"{name}.{i}", i)], f"{name}.{what}", axis=0)
        for i, what in enumerate("qkv")
    ]
    turned = draft.node("Transpose", [k], f"{name}.turned", perm=[0, 1, 3, 2])
    products = draft.node("MatMul", [q, turned], f"{name}.products")
    scale = draft.constant(f"{name}.scale", 1 / sqrt(size))
    scores = draft.node("Mul", [products, scale], f"{name}.scores")
    if at.layer.causal:
        later = np.triu(np.full((length, length), -np.inf), 1)
        mask = draft.constant(f"{name}.later", later)
        scores = draft.node("Add", [scores, mask], f"{name}.masked")
    weights = draft.node("Softmax", [scores], f"{name}.weights", axis=-1)
    means = draft.node("MatMul", [weights, v], f"{name}.means")
    means = draft.node("Transpose", [means], f"{name}.joined", perm=[0, 2, 1, 3])
    draft.node("Reshape", [means, draft.constant(f"{name}.shape", [0, length, features])], name)
