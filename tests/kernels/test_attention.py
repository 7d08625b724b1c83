"""Attention against the reference on every instruction set, and the reference against loops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.reference import AttentionKernels
from pydtnn.kernels.reference.attention import At, AttentionDropout
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.masks import both, documents, first_positions, positions_seen
from tests.each import each
from tests.kernels.checks import numeric_gradient
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded

REFERENCE = AttentionKernels(np)
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}
"""In norm: sums of up to 300 products, and exponentials."""

SIZES = [  # samples, positions, heads, elements of a head; a block has 60 queries and 128 keys
    *((1, 1, 1, 1), (3, 1, 2, 5), (0, 5, 2, 3), (2, 13, 3, 1), (2, 7, 1, 9), (3, 31, 2, 16)),
    *((1, 60, 2, 33), (1, 61, 3, 32), (1, 128, 1, 17), (1, 129, 2, 48), (2, 197, 3, 64)),
    (1, 300, 1, 70),
]


def operands(rng: np.random.Generator, size: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Float64 arrays qkv and dy; the scores have a deviation of about 2."""
    n, length, heads, width = size
    shape = (n, length, heads * width)
    return {
        "qkv": 1.5 * rng.standard_normal((*shape[:2], 3 * shape[2])),
        "dy": rng.standard_normal(shape),
    }


def run(
    attention: AttentionKernels, heads: int, arrays: dict[str, np.ndarray], **options: Any
) -> dict[str, np.ndarray]:
    """Both kernels on guarded copies, into outputs full of NaN."""
    qkv, dy = guarded(arrays["qkv"]), guarded(arrays["dy"])
    y, dqkv = guarded(np.full_like(dy, np.nan)), guarded(np.full_like(qkv, np.nan))
    log_sums = guarded(np.full((len(qkv), heads, qkv.shape[1]), np.nan, qkv.dtype))
    results = {"y": y, "log_sums": log_sums, "dqkv": dqkv}
    if "bias" in options:
        options = options | {"bias": guarded(options["bias"].astype(qkv.dtype))}
        results["dbias"] = guarded(np.full_like(options["bias"], np.nan))
    attention.forward(qkv, heads, out=y, log_sums=log_sums, **options)
    attention.backward(
        *(dy, qkv, y, log_sums, heads), out=dqkv, out_bias=results.get("dbias"), **options
    )
    for array in results.values():
        assert_guards_hold(array)
    return results


def dropped(samples: int, rate: float = 0.3) -> AttentionDropout:
    return AttentionDropout(
        rate, 2**32 + 11, stream("attention"), 5, 3 * np.arange(samples) + 2**33
    )


OPTIONS = [
    *({}, {"causal": True}, {"dropout": 0.3}, {"causal": True, "dropout": 0.7}),
    *({"lengths": True}, {"causal": True, "lengths": True, "dropout": 0.3}),
    *({"seen": True, "bias": True}, {"seen": True, "dropout": 0.4}, {"causal": True, "slopes": 1}),
    *({"bias": True, "scale": 1.0}, {"seen": True, "slopes": True, "bias": True, "scale": 0.1}),
]


def seen_by(options: dict[str, Any], samples: int, length: int) -> np.ndarray | None:
    """Intervals of causal order, of lengths (all positions, none, others), or random ones."""
    if not {"causal", "lengths", "seen"} & {*options}:
        return None
    rng = np.random.default_rng(length)
    window = None if options.get("causal") or "seen" not in options else 3 + length // 3
    seen = positions_seen(length, length, "causal" in options, window)
    if "lengths" in options:
        lengths = np.array([length, 0, (length + 1) // 2, 1, length - 1][:samples])
        seen = both(np, seen, first_positions(np, lengths, length, False))
    if "seen" in options:
        ids = np.sort(rng.integers(0, 4, (samples, length)))
        seen = both(np, seen, documents(ids))
        seen[:, rng.random(length) < 0.1] = length // 2  # see no key
    return seen


def given(options: dict[str, Any], size: tuple[int, int, int, int]) -> dict[str, Any]:
    """Options of the kernels with arrays for so many samples."""
    samples, length, heads, _ = size
    rng = np.random.default_rng(7)
    more: dict[str, Any] = {"seen": seen_by(options, samples, length)}
    if "dropout" in options:
        more["dropout"] = dropped(samples, options["dropout"])
    if "bias" in options:
        more["bias"] = rng.standard_normal((heads, length, length))
    if "slopes" in options:
        more["slopes"] = 0.5 ** np.arange(1, heads + 1)
    if "scale" in options:
        more["scale"] = options["scale"]
    return more


@each("wrong", [(0, 8), (-1, 3), (9, 9)])
def test_intervals_outside_of_the_keys_are_refused(cpu_backend, rng, wrong):
    seen = np.array([[[0, 7]] * 6 + [wrong]])
    with pytest.raises(ValueError, match=r"attention: keys must be in 0\.\.7, got"):
        run(cpu_backend.attention, 3, operands(rng, (2, 7, 3, 4)), seen=seen)


@each("dtype", [np.float32, np.float64])
@each(
    "size, options",
    [(size, OPTIONS[(i + at) % 11]) for at in (0, 2, 3, 6, 8) for i, size in enumerate(SIZES)],
)
def test_kernels_agree_with_the_reference(cpu_backend, rng, size, options, dtype):
    options = given(options, size)
    arrays = {name: array.astype(dtype) for name, array in operands(rng, size).items()}
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    expected = run(REFERENCE, size[2], exact, **options)
    for name, value in run(cpu_backend.attention, size[2], arrays, **options).items():
        assert value.dtype == dtype
        exist = np.isfinite(expected[name])  # sums of queries that see no key do not
        np.testing.assert_array_equal(value[~exist], expected[name][~exist])
        if name == "dbias" and size[1] == 1:  # 0, but for rounding errors
            np.testing.assert_allclose(value, 0, atol=TOLERANCE[dtype])
        else:
            assert_close(value[exist], expected[name][exist], TOLERANCE[dtype])


@each("options", OPTIONS[:4])
@each("size, bounds", [((2, 13, 3, 5), (0, 4, 5, 11, 13)), ((1, 300, 1, 33), (0, 61, 190, 300))])
def test_blocks_of_queries_and_keys_are_parts_of_the_whole(cpu_backend, rng, size, bounds, options):
    causal, options = "causal" in options, given(options, size)
    (samples, length, heads, width), arrays = size, operands(rng, size)
    features, parts = heads * width, [*pairwise(bounds)]
    expected = run(REFERENCE, heads, arrays, **options)
    whole = options.pop("seen")
    for kernels in (REFERENCE, cpu_backend.attention):
        gradient = np.zeros_like(arrays["qkv"])
        for start, stop in parts:
            q = guarded(arrays["qkv"][:, start:stop, :features].copy())
            shape = (samples, heads, stop - start)
            blocks = []
            for first, last in parts:
                if causal and first > start:
                    continue
                seen = (
                    None if whole is None else (whole[:, start:stop] - first).clip(0, last - first)
                )
                kv = guarded(arrays["qkv"][:, first:last, features:].copy())
                y, sums = guarded(np.full_like(q, np.nan)), guarded(np.full(shape, np.nan))
                at = At(start, first, length)
                kernels.forward(q, heads, out=y, log_sums=sums, kv=kv, at=at, seen=seen, **options)
                assert_guards_hold(y)
                assert_guards_hold(sums)
                blocks.append((first, last, kv, at, seen, y, sums))
            total = np.logaddexp.reduce([sums for *_, sums in blocks])
            shares = [np.exp(sums - total).transpose(0, 2, 1)[..., None] for *_, sums in blocks]
            heads_of = [y.reshape(*y.shape[:2], heads, width) for *_, y, _ in blocks]
            y = sum(a * b for a, b in zip(shares, heads_of, strict=True)).reshape(q.shape)
            assert_close(y, expected["y"][:, start:stop], 1e-12)
            assert_close(total, expected["log_sums"][..., start:stop], 1e-12)
            dy = arrays["dy"][:, start:stop].copy()
            for first, last, kv, at, seen, *_ in blocks:
                dq, dkv = guarded(np.full_like(q, np.nan)), guarded(np.full_like(kv, np.nan))
                kernels.backward(
                    *(dy, q, y, total, heads),
                    out=dq,
                    out_kv=dkv,
                    kv=kv,
                    at=at,
                    seen=seen,
                    **options,
                )
                assert_guards_hold(dq)
                assert_guards_hold(dkv)
                gradient[:, start:stop, :features] += dq
                gradient[:, first:last, features:] += dkv
        assert_close(gradient, expected["dqkv"], 1e-12)


@each("causal", [False, True])
def test_the_reference_computes_the_sums_of_the_definition(rng, causal):
    n, length, heads, width = 2, 5, 2, 3
    qkv = rng.standard_normal((n, length, 3 * heads * width))
    y, log_sums = np.empty((n, length, heads * width)), np.empty((n, heads, length))
    intervals = positions_seen(length, length, causal, None)
    REFERENCE.forward(qkv, heads, out=y, log_sums=log_sums, seen=intervals)
    parts = qkv.reshape(n, length, 3, heads, width)
    for sample, head, i in np.ndindex(n, heads, length):
        q, k, v = (parts[sample, :, part, head] for part in range(3))
        seen = i + 1 if causal else length
        e = np.array([np.exp(q[i] @ k[j] / width**0.5) for j in range(seen)])
        assert log_sums[sample, head, i] == pytest.approx(np.log(e.sum()), rel=1e-12)
        expected = sum(e[j] / e.sum() * v[j] for j in range(seen))
        own = y[sample, i, head * width : (head + 1) * width]
        np.testing.assert_allclose(own, expected, rtol=1e-12)


def differences(number: int) -> tuple[dict[str, Any], ...]:
    """Options, operands, and gradients by differences of the reference."""
    size = (2, 5, 2, 3)
    options, arrays = given(OPTIONS[number], size), operands(np.random.default_rng(number), size)

    def forward(qkv: np.ndarray) -> np.ndarray:
        return run(REFERENCE, size[2], {**arrays, "qkv": qkv}, **options)["y"]

    def of_bias(bias: np.ndarray) -> np.ndarray:
        return run(REFERENCE, size[2], arrays, **options | {"bias": bias})["y"]

    expected = {"dqkv": numeric_gradient(forward, arrays["qkv"], arrays["dy"])}
    if "bias" in options:
        expected["dbias"] = numeric_gradient(of_bias, options["bias"], arrays["dy"])
    return options, arrays, expected


@each("number", range(len(OPTIONS)))
def test_gradients_are_those_of_differences(cpu_backend, once, number):
    options, arrays, expected = once(differences, number)
    found = run(cpu_backend.attention, 2, arrays, **options)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-8)


def test_scores_far_from_zero_neither_overflow_nor_vanish(cpu_backend):
    n, length, heads, width = 1, 140, 1, 4
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((n, length, 3 * width)).astype("float32")
    qkv[..., : 2 * width] *= 30  # scores of some thousands
    arrays = {"qkv": qkv, "dy": rng.standard_normal((n, length, width)).astype("float32")}
    exact = {name: array.astype("float64") for name, array in arrays.items()}
    value = run(cpu_backend.attention, heads, arrays)
    expected = run(REFERENCE, heads, exact)
    assert np.abs(expected["log_sums"]).max() > 1000
    assert all(np.isfinite(array).all() for array in value.values())
    # scores of 3000 have a last place of 2.4e-4, which is the relative error of weights
    assert_close(value["y"], expected["y"], 1e-3)


def test_weights_are_dropped_at_the_rate_by_sample_and_head(rng):
    n, length, heads, rate = 4, 30, 2, 0.3
    qkv = np.zeros((n, length, 3 * heads * length))
    values = np.broadcast_to(np.eye(length), (n, heads, length, length))
    qkv[..., 2 * heads * length :] = values.transpose(0, 2, 1, 3).reshape(n, length, -1)
    y, log_sums = np.empty((n, length, heads * length)), np.empty((n, heads, length))
    key = dropped(n, rate)
    REFERENCE.forward(qkv, heads, out=y, log_sums=log_sums, dropout=key)
    kept = y.reshape(n, length, heads, length) != 0  # y is the weights: 1 / length, or dropped
    np.testing.assert_allclose(y[y != 0], 1 / length / (1 - rate), rtol=1e-12)
    # 7200 draws: the standard error is 0.0054
    assert abs(kept.mean() - (1 - rate)) < 0.022
    rows = kept.transpose(0, 2, 1, 3).reshape(n * heads * length, length)
    assert len(np.unique(rows, axis=0)) == len(rows)
    again = np.empty_like(y[2:])
    later = key._replace(samples=key.samples[2:])
    REFERENCE.forward(qkv[2:], heads, out=again, log_sums=log_sums[2:], dropout=later)
    np.testing.assert_array_equal(again, y[2:])


def test_arrays_of_the_wrong_size_are_refused(cpu_backend):
    qkv, y, sums = np.zeros((2, 5, 18)), np.zeros((2, 5, 6)), np.zeros((2, 3, 5))
    with pytest.raises(ValueError, match=r"30 elements, .* \(2, 5, 6\)"):
        cpu_backend.attention.forward(qkv[:1], 3, out=y, log_sums=sums)
    with pytest.raises(ValueError, match=r"30 elements, .* \(1, 3, 5\)"):
        cpu_backend.attention.forward(qkv, 3, out=y, log_sums=sums[:1])
    with pytest.raises(ValueError, match="60 elements"):
        cpu_backend.attention.backward(y[:1], qkv, y, sums, 3, out=np.empty_like(qkv))
