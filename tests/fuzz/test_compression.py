"""Random compressors over random numbers of ranks, which are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.compression import CompressedSums, Compressor, Context, create_sums
from tests.parallel.compression.cases import buckets_of, fill, read

Rng = np.random.Generator

pytestmark = pytest.mark.fuzz("distributed")


def threshold(limit: float, **options: Any) -> Compressor:
    """Send what is above a limit: a length that varies."""

    def compress(x: np.ndarray, context: Context) -> tuple[np.ndarray, ...]:
        kept = np.flatnonzero(~(np.abs(x) <= limit))  # NaN, too
        return kept.astype("uint16"), x[kept]

    def restore(parts: Any, out: np.ndarray, context: Context) -> None:
        out[parts[0]] += parts[1]

    return Compressor(compress, restore, varies=True, **options)


def head(share: float, **options: Any) -> Compressor:
    """Send a view of the first gradients."""

    def compress(x: np.ndarray, context: Context) -> tuple[np.ndarray, ...]:
        return (x[: 1 + int(share * (x.size - 1))],)

    def restore(parts: Any, out: np.ndarray, context: Context) -> None:
        out[: parts[0].size] += parts[0]

    return Compressor(compress, restore, **options)


def draw_compressor(rng: Rng) -> tuple[str, Callable[[Communicator], CompressedSums]]:
    """Return a name, and what makes the sums of a rank."""
    feedback, seed = bool(rng.integers(2)), int(rng.integers(5))
    more: dict[str, Any] = {"feedback": feedback, "seed": seed}
    names = ["float16", "bfloat16", "int8", "sign", "top_k", "random_k"]
    name = str(rng.choice([*names, "threshold", "head"]))
    if name == "threshold":
        return name, threshold(10 ** rng.uniform(-4, 0), **more)
    if name == "head":
        kind = ["plain", "varies", "adds"][rng.integers(3)]
        return name, head(rng.random(), varies=kind == "varies", adds=kind == "adds", **more)
    if name == "float16":
        more["scale"] = 2.0 ** int(rng.integers(-8, 9))
    elif name in ("int8", "sign"):
        more["block"] = int(rng.choice([1, 3, 64, 512]))
    elif name in ("top_k", "random_k"):
        more["share"] = float(rng.choice([0.001, 0.1, 0.5, 1.0]))
    return name, create_sums(name, **more)  # type: ignore[return-value]


def draw_shapes(rng: Rng) -> list[tuple[int, ...]]:
    return [
        tuple(rng.integers(0 if rng.random() < 0.1 else 1, 9, rng.integers(1, 4)).tolist())
        for _ in range(rng.integers(1, 7))
    ]


def draw_gradients(
    buckets: tuple[Bucket, ...], seed: int, rank: int, step: int
) -> list[list[np.ndarray]]:
    """Gradients of each parameter of each bucket, whose sizes differ by orders of magnitude."""
    rng = np.random.default_rng([seed, rank, step])
    return [
        [
            (rng.normal(size=e.shape) * 10.0 ** rng.integers(-6, 2)).astype(b.grads.dtype)
            for e in b.parameters
        ]
        for b in buckets
    ]


def flat(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(array.reshape(-1) for array in arrays)])


class Reference:
    """What one rank sends of one bucket, by the definition of error feedback."""

    def __init__(self, one: Compressor, bucket: Bucket, rank: int) -> None:
        self.one, self.bucket, self.rank = one, bucket, rank
        self.sizes = tuple(int(np.prod(e.shape)) for e in bucket.parameters)
        self.error = np.zeros(sum(self.sizes), bucket.grads.dtype)

    def send(self, x: np.ndarray, step: int) -> np.ndarray:
        x = self.error + x
        context = Context(self.one.seed, step, self.bucket.index, self.rank, self.sizes)
        out = np.zeros_like(x)
        if x.size:
            parts = tuple(part.copy() for part in self.one.compress(x, context))
            self.one.restore(parts, out, context)
        if self.one.feedback:
            self.error = x - out
        return out


def test_random_compressors_sum_what_each_rank_sends(cases):
    """Sums, the errors that are kept, and both after a state is loaded in the middle."""
    for case in cases:
        rng = case.rng
        name, make = draw_compressor(rng)
        size, steps, seed = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.integers(99))
        shapes, dtype = draw_shapes(rng), str(rng.choice(["float32", "float64"]))
        bucket_bytes, middle = int(rng.choice([64, 512, 1 << 20])), int(rng.integers(steps + 1))
        order = rng.integers(0, 1 << 30, steps)

        def rank(
            comm: Communicator,
            make=make,
            shapes=shapes,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            steps=steps,
            middle=middle,
            seed=seed,
            order=order,
        ) -> tuple[Any, ...]:
            buckets = buckets_of(shapes, dtype, bucket_bytes)
            sums = make(comm)
            sums.prepare(buckets)
            results = []
            for step in range(steps):
                if step == middle:
                    state, sums = sums.state(), make(comm)
                    sums.prepare(buckets)
                    sums.load(state)
                for bucket, arrays in zip(
                    buckets, draw_gradients(buckets, seed, comm.rank, step), strict=True
                ):
                    fill(bucket, arrays)
                requests = [sums.start(bucket) for bucket in buckets]
                # Ranks poke and wait in orders of their own, as their computation takes them.
                own = np.random.default_rng([order[step], comm.rank])
                for index in own.permutation(len(requests)):
                    requests[index].test()
                for request in requests:
                    request.wait()
                results.append([flat(read(bucket), bucket.grads.dtype) for bucket in buckets])
            return results, sums.state(), sums.compressor

        outcomes = run_threads(size, rank)
        one = outcomes[0][2]
        buckets = buckets_of(shapes, dtype, bucket_bytes)
        for number, bucket in enumerate(buckets):
            references = [Reference(one, bucket, r) for r in range(size)]
            for step in range(steps):
                grads = [draw_gradients(buckets, seed, r, step)[number] for r in range(size)]
                sent = [
                    reference.send(flat(own, bucket.grads.dtype), step)
                    for reference, own in zip(references, grads, strict=True)
                ]
                total = np.zeros_like(sent[0])
                for array in sent:
                    total += array
                for results, _, _ in outcomes:
                    given = results[step][number]
                    case.compare(np.testing.assert_array_equal, given, outcomes[0][0][step][number])
                    # Parts that are added are rounded in their own type after each addition.
                    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(name, 0.0)
                    unit = max(unit, float(np.finfo(dtype).eps)) if one.adds else 0.0
                    least = 2.0**-24 * 2.0**8 if name == "float16" else 0.0  # subnormal, unscaled
                    largest = sum(np.abs(array) for array in sent)
                    off = np.abs(given - total) - size * (unit * largest + least)
                    case.compare(_at_most, off, 0.0, name)
            if one.feedback:
                for reference, (_, state, _) in zip(references, outcomes, strict=True):
                    kept = [state[f"error/{e.name}"] for e in bucket.parameters]
                    kept_flat = flat(kept, bucket.grads.dtype)
                    case.compare(np.testing.assert_array_equal, kept_flat, reference.error)


def _at_most(values: np.ndarray, limit: float, name: str) -> None:
    assert np.all(values <= limit), f"{name}: {values.max()} above {limit}"


def draw_extremes(rng: Rng, size: int, dtype: np.dtype, limit: float) -> np.ndarray:
    """Values between the smallest and a limit, zeros and sometimes a few that are not finite."""
    least = np.log10(float(np.finfo(dtype).smallest_subnormal))
    powers = rng.choice([*rng.uniform(least, np.log10(limit), 2), np.log10(limit), 0.0], 2)
    x = 10.0 ** rng.uniform(powers.min(), powers.max(), size) * rng.choice([-1, 0, 1], size)
    x = np.where(np.abs(x) > limit, np.sign(x) * limit, x).astype(dtype)
    if size and rng.random() < 0.2:
        x[rng.integers(size, size=rng.integers(1, 4))] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def test_random_extremes_stay_finite_or_show_in_the_sum(cases):
    for case in cases:
        rng = case.rng
        in_two = rng.random() < 0.25
        name, make = draw_compressor(rng)
        if in_two:
            columns = int(rng.integers(1, 4))
            name, make = "power_sgd", create_sums("power_sgd", rank=columns)  # type: ignore[assignment]
        size, seed = int(rng.integers(1, 6)), int(rng.integers(1 << 30))
        shapes, dtype = draw_shapes(rng), np.dtype(str(rng.choice(["float32", "float64"])))
        limit = float(np.finfo(dtype).max) / size / 4  # rounding may make a value twice as large

        @np.errstate(all="ignore")  # as in the trainer's steps
        def rank(
            comm: Communicator, make=make, shapes=shapes, dtype=dtype, limit=limit, seed=seed
        ) -> list[Any]:
            own, outcome = np.random.default_rng([seed, comm.rank]), []
            for extreme in (True, False):
                if extreme or not outcome[0]:
                    sums = make(comm)  # after huge gradients, errors may be as huge
                    (bucket,) = buckets_of(shapes, str(dtype))
                    sums.prepare((bucket,))
                n = sum(int(np.prod(e.shape)) for e in bucket.parameters)
                x = draw_extremes(own, n, dtype, limit) if extreme else own.normal(size=n)
                cuts = np.cumsum([int(np.prod(e.shape)) for e in bucket.parameters])[:-1]
                fill(bucket, np.split(x, cuts))
                sums.start(bucket).wait()
                bad = any(comm.gather_object(not np.isfinite(x).all()))
                outcome += [bad, bucket.grads.copy()]
            return outcome

        outcomes = run_threads(size, rank)
        for bad, first, _, second in outcomes:
            case.compare(np.testing.assert_array_equal, first, outcomes[0][1])
            case.compare(_same, np.isfinite(first).all(), not bad, name)
            case.compare(np.testing.assert_array_equal, second, outcomes[0][3])
            case.compare(_same, np.isfinite(second).all(), True, name)


def _same(given: object, wanted: object, name: str) -> None:
    assert given == wanted, name
