"""Attention with masks and biases beside PyTorch's, in 500 random cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers.masks import both, documents, first_positions, positions_seen
from tests.each import each
from tests.kernels.guarded import assert_close

torch = pytest.importorskip("torch")
F = torch.nn.functional

CASES = 500


def drawn(rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray | None]:
    """Operands in float64 and options of a kernel, and its intervals (N, T1, 2)."""
    n, queries, heads, width = (int(rng.integers(1, most)) for most in (4, 150, 4, 40))
    cross = rng.random() < 0.3
    keys = int(rng.integers(1, 150)) if cross else queries
    window = int(rng.integers(1, keys + 1)) if rng.random() < 0.4 else None
    seen: np.ndarray | None = positions_seen(queries, keys, bool(rng.random() < 0.5), window)
    if rng.random() < 0.3:
        seen = None
    if rng.random() < 0.4:
        lengths = rng.integers(0, keys + 1, n)
        seen = both(np, seen, first_positions(np, lengths, queries, cross))
    if not cross and rng.random() < 0.4:
        seen = both(np, seen, documents(np.sort(rng.integers(0, 5, (n, queries)))))
    shapes = (n, heads, queries, width), (n, heads, keys, width), (n, heads, keys, width)
    case: dict[str, Any] = {"qkv": [rng.standard_normal(shape) for shape in shapes]}
    if rng.random() < 0.4:
        case["bias"] = rng.standard_normal((heads, queries, keys))
    if rng.random() < 0.3:
        case["slopes"] = rng.random(heads)
    case["scale"] = float(rng.random() + 0.1) if rng.random() < 0.3 else None
    case["dy"] = rng.standard_normal(shapes[0])
    return case, seen


def joined(*parts: np.ndarray) -> np.ndarray:
    """Heads (N, H, T, E) side by side, (N, T, parts H E)."""
    rows = [x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1) for x in parts]
    return np.concatenate(rows, axis=-1)


def ours(case: dict[str, Any], seen: np.ndarray | None, dtype: Any) -> list[np.ndarray]:
    """The output, and gradients of queries, of keys and values, and of the bias."""
    attention = create_backend("cpu").attention
    q, k, v = case["qkv"]
    heads, options = q.shape[1], {name: case.get(name) for name in ("slopes", "scale")}
    if case.get("bias") is not None:
        options["bias"] = case["bias"].astype(dtype)
    rows, kv, dy = (joined(*x).astype(dtype) for x in ((q,), (k, v), (case["dy"],)))
    y, dq, dkv = np.empty_like(rows), np.empty_like(rows), np.empty_like(kv)
    sums = np.empty(q.shape[:3], dtype)
    options.update(kv=kv, seen=seen)
    attention.forward(rows, heads, out=y, log_sums=sums, **options)
    dbias = None if "bias" not in options else np.empty_like(options["bias"])
    attention.backward(dy, rows, y, sums, heads, out=dq, out_kv=dkv, out_bias=dbias, **options)
    return [y, dq, dkv, *([] if dbias is None else [dbias])]


def theirs(case: dict[str, Any], seen: np.ndarray | None, dtype: Any) -> list[np.ndarray]:
    """The same, where queries that see no key see the first one, with values of 0."""
    q, k, v = (torch.tensor(x.astype(dtype), requires_grad=True) for x in case["qkv"])
    mask = torch.zeros((1, q.shape[1], q.shape[2], k.shape[2]), dtype=q.dtype)
    bias = None
    if "bias" in case:
        bias = torch.tensor(case["bias"].astype(dtype), requires_grad=True)
        mask = mask + bias
    at, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if "slopes" in case:
        mask = mask - torch.tensor(case["slopes"].astype(dtype))[:, None, None] * abs(at - keys)
    sees_any = torch.ones(1, dtype=torch.bool)
    if seen is not None:
        first, end = (torch.tensor(seen[:, None, :, i : i + 1]) for i in range(2))
        sees_any = first < end
        hidden = (keys < first) | (keys >= end)
        mask = mask.masked_fill(hidden & (sees_any | (keys > 0)), -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case["scale"]) * sees_any
    y.backward(torch.tensor(case["dy"].astype(dtype)))
    gradients = [joined(y.detach().numpy()), joined(q.grad.numpy())]
    gradients.append(joined(k.grad.numpy(), v.grad.numpy()))
    return gradients if bias is None else [*gradients, bias.grad.numpy()]


@each("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_outputs_and_gradients_are_those_of_scaled_dot_product_attention(dtype, tolerance):
    for number in range(CASES):
        case, seen = drawn(np.random.default_rng(number))
        results, expected = ours(case, seen, dtype), theirs(case, seen, np.float64)
        size = np.linalg.norm(case["dy"])  # gradients of queries that see one key are 0
        for value, other in zip(results, expected, strict=True):
            pair = np.append(value, size), np.append(other, size)
            assert_close(*pair, tolerance, f"case {number}:")
