"""Each compressor does what its paper says, to arrays of any length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pydtnn.comm import Serial, run_threads
from pydtnn.parallel.compression import CompressedSums, Compressor, Context, create_sums
from tests.each import each

SIZES = [1, 2, 101, 512]
REALS = ["float32", "float64"]

ALL: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": {},
    "int8": {"block": 64},
    "top_k": {"share": 0.1},
    "random_k": {"share": 0.1},
    "sign": {"block": 64},
}


def compressor(name: str, size: int = 1, **options: Any) -> Compressor:
    """The compressor of a name, as rank 0 of `size` would have it."""
    make = create_sums(name, **options)
    sums = run_threads(size, make)[0] if size > 1 else make(Serial())
    assert isinstance(sums, CompressedSums)
    return sums.compressor


def draw(rank: int = 0, step: int = 0, sizes: tuple[int, ...] = ()) -> Context:
    return Context(seed=3, step=step, bucket=1, rank=rank, sizes=sizes)


def sent(one: Compressor, x: np.ndarray, context: Context | None = None) -> np.ndarray:
    """What the others learn of `x`."""
    context = replace(context or draw(), sizes=(x.size,))
    given, out = x.copy(), np.zeros_like(x)
    with np.errstate(all="ignore"):  # as the library does
        one.restore(one.compress(x, context), out, context)
    np.testing.assert_array_equal(x, given)  # compressing does not change it
    assert out.dtype == x.dtype
    return out


def values(size: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    return (rng.normal(size=size) * 10.0 ** rng.uniform(-5, 1, size)).astype(dtype)


@each("dtype", REALS)
@each("size", SIZES)
@each("name", ALL)
def test_restore_adds_to_what_is_there(name, size, dtype, rng):
    one, x = compressor(name, **ALL[name]), values(size, dtype, rng)
    out, context = np.ones_like(x), draw(sizes=(size,))
    one.restore(one.compress(x, context), out, context)
    np.testing.assert_array_equal(out, 1 + sent(one, x))


@each("dtype", REALS)
@each("size", SIZES)
def test_short_floats_are_the_nearest(size, dtype, rng):
    x = values(size, dtype, rng)
    for name, kind in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        if dtype == "float32":  # from float64, ml_dtypes rounds twice
            np.testing.assert_array_equal(sent(compressor(name), x), x.astype(kind).astype(dtype))


def test_a_factor_keeps_small_gradients_in_float16(rng):
    x = (1e-7 * rng.normal(size=100)).astype("float32")
    error = {s: np.abs(sent(compressor("float16", scale=s), x) - x).max() for s in (1.0, 2.0**14)}
    assert error[2.0**14] < 2**-10 * np.abs(x).max()
    assert error[1.0] > 2**-6 * np.abs(x).max()


@each("dtype", REALS)
@each("size", SIZES)
def test_int8_is_less_than_a_level_off_and_sends_the_greatest_as_it_is(size, dtype, rng):
    x = values(size, dtype, rng)
    y = sent(compressor("int8", block=64), x)
    for start in range(0, size, 64):
        a, b = x[start : start + 64], y[start : start + 64]
        greatest = np.argmax(np.abs(a))
        level = abs(a[greatest]) / 127
        assert (np.abs(b - a) < 1.0001 * level).all()  # a float32 is rounded by 1e-7
        assert abs(b[greatest] - a[greatest]) < 1e-6 * abs(a[greatest])


def test_int8_is_right_in_the_mean():
    x = np.linspace(-1, 1, 51).astype("float32") ** 3
    one, draws = compressor("int8", block=20), 1000
    mean = np.mean([sent(one, x, draw(step=step)) for step in range(draws)], axis=0)
    level = np.repeat([np.abs(x[i : i + 20]).max() / 127 for i in range(0, 51, 20)], 20)[:51]
    # One draw deviates by at most half a level, so the mean by 1 / (2 sqrt(draws)); 5 of these.
    assert (np.abs(mean - x) < 5 * level / 2 / draws**0.5).all()
    drawn = [sent(one, x, draw(rank)) for rank in (0, 1, 1)]
    assert np.abs(drawn[0] - x).max() > 0.1 * level.min()  # which one draw is not
    assert (drawn[0] != drawn[1]).any()  # ranks round independently
    np.testing.assert_array_equal(drawn[1], drawn[2])


@each("size", SIZES)
def test_sign_sends_signs_and_the_mean_size_of_a_block(size, rng):
    x = values(size, "float64", rng)
    x[::7] = 0
    y = sent(compressor("sign", block=64), x)
    for start in range(0, size, 64):
        a = x[start : start + 64]
        mean = np.where(a >= 0, 1, -1) * np.abs(a).mean()
        np.testing.assert_allclose(y[start : start + 64], mean, rtol=1e-14)  # rounding of a mean


@each("name", ["int8", "sign"])
def test_blocks_end_where_parameters_end(name, rng):
    large, small = rng.normal(size=70), 1e-6 * rng.normal(size=37)
    sizes, one = (70, 0, 37), compressor(name, block=64)
    x, out = np.concatenate([large, small]), np.zeros(107)
    context = draw(sizes=sizes)
    one.restore(one.compress(x, context), out, context)
    assert np.abs(out[70:]).max() <= np.abs(small).max()
    assert np.abs(out[70:]).min() > 0 or name == "int8"


@each("share", [0.01, 0.1, 0.5, 1.0])
@each("size", SIZES)
def test_top_k_sends_the_greatest_as_they_are(size, share, rng):
    x = values(size, "float32", rng)
    y = sent(compressor("top_k", share=share), x)
    kept = np.flatnonzero(y)
    assert len(kept) == max(1, int(np.ceil(share * size)))
    np.testing.assert_array_equal(y[kept], x[kept])
    assert np.abs(x[kept]).min() >= np.abs(np.delete(x, kept)).max(initial=0)
    assert np.count_nonzero(sent(compressor("top_k", share=share), np.full(size, -2.0))) == len(
        kept
    )


@each("size", SIZES)
def test_random_k_chooses_the_same_on_all_ranks_and_others_in_the_next_step(size, rng):
    x, one = values(size, "float64", rng), compressor("random_k", share=0.2)
    chosen = [
        np.flatnonzero(sent(one, x, draw(rank=r, step=s))) for r, s in ((0, 0), (1, 0), (0, 1))
    ]
    assert len(chosen[0]) == max(1, int(np.ceil(0.2 * size)))
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert size < 17 or not np.array_equal(chosen[0], chosen[2])


def test_random_k_is_right_in_the_mean_without_feedback_and_plain_with_it(rng):
    x, draws = rng.normal(size=13), 1000
    one = compressor("random_k", share=0.3, feedback=False)  # 4 of 13
    mean = np.mean([sent(one, x, draw(step=step)) for step in range(draws)], axis=0)
    deviation = np.abs(x) * np.sqrt((13 / 4 - 1) / draws)
    assert (np.abs(mean - x) < 5 * deviation).all()
    with_feedback = sent(compressor("random_k", share=0.3, feedback=True), x)
    kept = np.flatnonzero(with_feedback)
    np.testing.assert_array_equal(with_feedback[kept], x[kept])


@each(
    ("name", "options", "words"),
    [
        ("top_k", {"share": 0}, "top_k: share must be above 0 and at most 1, got 0"),
        ("top_k", {"shar": 0.1}, "unknown option of top_k 'shar'; did you mean 'share'"),
        ("top_k", {"share": "few"}, "top_k: share must be a number, got 'few'"),
        ("random_k", {"share": 1.5}, "random_k: share must be above 0"),
        ("int8", {"block": 0}, "int8: block must be at least 1, got 0"),
        ("sign", {"block": -1}, "sign: block must be at least 1, got -1"),
        ("float16", {"scale": 0}, "float16: scale must be at least 1e-30"),
        ("float", {}, "unknown compressor 'float'; removed: use 'bfloat16' or 'int8'"),
        ("power_sgd", {"rank": 0}, "power_sgd: rank must be at least 1, got 0"),
        ("topk2", {}, "unknown compressor 'topk2'; did you mean"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(name, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        create_sums(name, **options)


def test_messages_have_the_bytes_that_the_manual_states_for_the_defaults(rng):
    n = 51200
    expected = {
        **{"float16": 2 * n, "bfloat16": 2 * n, "int8": n + 4 * n // 512},
        **{"top_k": 8 * n // 100, "random_k": 4 * n // 10, "sign": n // 8 + 4 * n // 128},
    }
    x = rng.normal(size=n).astype("float32")
    for name, nbytes in expected.items():
        parts = compressor(name).compress(x, draw(sizes=(n,)))
        assert sum(part.nbytes for part in parts) == nbytes, name
