"""Compressed sums over ranks: what arrives, what is kept, what travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.compression import CompressedSums, Compressor, Context, create_sums
from tests.each import each
from tests.parallel.compression.cases import buckets_of, exchanged, fill, gradients, padding, read

SMALL = 1 << 9
"""Bytes of a bucket, so that there are several."""

ALL: list[tuple[str, dict[str, Any]]] = [
    ("float16", {}),
    ("bfloat16", {"feedback": True}),
    ("float", {"exponent": 5, "mantissa": 6}),
    ("int8", {"block": 64}),
    ("int8", {"block": 64, "feedback": True}),
    ("top_k", {"share": 0.1}),
    ("random_k", {"share": 0.1, "feedback": False}),
    ("random_k", {"share": 0.1, "feedback": True}),
    ("sign", {"block": 64}),
]


def new_sums(comm: Communicator, case: tuple[str, dict[str, Any]]) -> CompressedSums:
    sums = create_sums(case[0], **case[1])(comm)
    assert isinstance(sums, CompressedSums)
    return sums


def expected(sums: CompressedSums, bucket: Bucket, size: int, steps: int) -> list[np.ndarray]:
    """The sum of the last step, by the definition of error feedback, rank after rank."""
    one = sums.compressor
    n = sum(array.size for array in gradients(bucket, 0, 0))
    total = np.zeros(n, bucket.grads.dtype)
    for rank in range(size):
        error = np.zeros_like(total)
        for step in range(steps):
            arrays = gradients(bucket, rank, step)
            x = error + np.concatenate([array.reshape(-1) for array in arrays])
            sizes = tuple(array.size for array in arrays)
            context = Context(0, step, bucket.index, rank, sizes)
            parts, out = one.compress(x, context), np.zeros_like(x)
            one.restore(parts, out, context)
            error = x - out if one.feedback else error
        one.restore(parts, total, context)
    cuts = np.cumsum([array.size for array in arrays])[:-1]
    return [
        part.reshape(e.shape)
        for part, e in zip(np.split(total, cuts), bucket.parameters, strict=True)
    ]


@pytest.mark.threads(1, 2, 3)
@pytest.mark.mpi(2, 3)
@each("dtype", ["float32", "float64"])
@each("case", ALL)
def test_sums_are_those_of_what_each_rank_sends(comm, case, dtype):
    buckets, steps = buckets_of(dtype=dtype, bucket_bytes=SMALL), 3
    assert len(buckets) > 1
    sums = new_sums(comm, case)
    sums.prepare(buckets)
    for step in range(steps):
        results = exchanged(comm, sums, buckets, step)
    for bucket, result in zip(buckets, results, strict=True):
        for given, wanted in zip(result, expected(sums, bucket, comm.size, steps), strict=True):
            if sums.compressor.adds:  # in another order; the halves are rounded after each addition
                unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(case[0], 2.0**-23)
                # of partial sums, which are as large as the ranks' values
                atol = 2 * comm.size**2 * unit * max(np.abs(wanted).max(), np.abs(given).max(), 4)
                np.testing.assert_allclose(given, wanted, rtol=0, atol=atol)
            else:
                np.testing.assert_array_equal(given, wanted)


@pytest.mark.threads(2, 3)
@pytest.mark.mpi(2, 4)
@each("case", ALL)
def test_all_ranks_get_the_same_bytes_and_padding_stays_zero(comm, case):
    buckets = buckets_of(bucket_bytes=SMALL)
    sums = new_sums(comm, case)
    sums.prepare(buckets)
    for step in range(3):
        exchanged(comm, sums, buckets, step)
        own = [bucket.grads.tobytes() for bucket in buckets]
        assert all(other == own for other in comm.gather_object(own))
        assert not any(padding(bucket).any() for bucket in buckets)


@pytest.mark.threads(1, 2, 3)
@each("case", [c for c in ALL if c[1].get("feedback", True)])
def test_feedback_loses_nothing(comm, case):
    buckets = buckets_of(dtype="float64", bucket_bytes=SMALL)
    sums = new_sums(comm, (case[0], case[1] | {"feedback": True}))
    sums.prepare(buckets)
    arrived: Any = 0
    given: Any = 0
    for step in range(10):
        for bucket in buckets:
            fill(bucket, gradients(bucket, comm.rank, step))
        given = given + np.concatenate([bucket.grads for bucket in buckets])
        for bucket in buckets:
            sums.start(bucket).wait()
        arrived = arrived + np.concatenate([bucket.grads for bucket in buckets])
    errors = sums.state()
    for bucket in buckets:
        fill(bucket, [errors[f"error/{entry.name}"] for entry in bucket.parameters])
    kept = np.concatenate([bucket.grads for bucket in buckets])
    comm.allreduce(given)
    comm.allreduce(kept)
    # Sums of halves are rounded once more, which no rank keeps.
    halves = {"float16": 2.0**-11, "bfloat16": 2.0**-8} if comm.size > 1 else {}
    rounded = halves.get(case[0], 1e-13)
    scale = 10 * comm.size * np.abs(given).max()
    np.testing.assert_allclose(arrived + kept, given, rtol=0, atol=rounded * scale)
    assert np.abs(kept).max() > 0


@pytest.mark.threads(2)
@each("case", ALL)
def test_a_saved_state_continues_in_the_same_bytes(comm, case):
    buckets = buckets_of(bucket_bytes=SMALL)
    whole, parts = new_sums(comm, case), new_sums(comm, case)
    whole.prepare(buckets)
    for step in range(2):
        exchanged(comm, whole, buckets, step)
    state = whole.state()
    straight = [exchanged(comm, whole, buckets, step) for step in (2, 3)]
    parts.prepare(buckets)
    parts.load(state)
    for step, results in zip((2, 3), straight, strict=True):
        for given, wanted in zip(exchanged(comm, parts, buckets, step), results, strict=True):
            for a, b in zip(given, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.threads(3)
@pytest.mark.mpi(3)
def test_a_part_of_the_sum_is_a_part_of_it(comm):
    (bucket,) = buckets_of()
    sums = new_sums(comm, ("int8", {}))
    sums.prepare((bucket,))
    exchanged(comm, sums, (bucket,), 0)
    whole = bucket.grads.copy()
    counts = [5, 0, len(whole) - 5]
    out = np.empty(counts[comm.rank], whole.dtype)
    sums.prepare((bucket,))
    fill(bucket, gradients(bucket, comm.rank, 0))
    sums.part(bucket, counts, out)
    begin = sum(counts[: comm.rank])
    np.testing.assert_array_equal(out, whole[begin : begin + len(out)])


@pytest.mark.threads(2, 3)
@pytest.mark.mpi(2, 3)
@each("case", [*ALL, ("power_sgd", {"rank": 1})])
def test_a_step_may_begin_before_the_last_has_arrived(comm, case):
    own = buckets_of(bucket_bytes=SMALL)
    results = []
    for ahead in (False, True):
        sums = create_sums(case[0], **case[1])(comm)
        sums.prepare(own)
        late = [[replace(b, grads=np.zeros_like(b.grads)) for b in own] for _ in range(3)]
        requests = []
        for step, buckets in enumerate(late):
            for bucket in buckets:
                fill(bucket, gradients(bucket, comm.rank, step))
                requests.append(sums.start(bucket))
                if not ahead:
                    requests[-1].wait()
        for request in requests:
            request.wait()
        results.append([bucket.grads.tobytes() for buckets in late for bucket in buckets])
    assert results[0] == results[1]


@pytest.mark.threads(1, 2)
@each("case", [*ALL, ("power_sgd", {"rank": 1})])
def test_a_step_that_is_not_finite_leaves_nothing_behind(comm, case):
    buckets = buckets_of(bucket_bytes=SMALL)
    sums = create_sums(case[0], **case[1])(comm)
    sums.prepare(buckets)
    exchanged(comm, sums, buckets, 0)
    for bucket in buckets:
        fill(bucket, [np.full(entry.shape, np.nan) for entry in bucket.parameters])
        sums.start(bucket).wait()
    for step in (2, 3):
        for result in exchanged(comm, sums, buckets, step):
            assert all(np.isfinite(array).all() for array in result)


@pytest.mark.threads(3)
@each("name", ["float16", "bfloat16"])
def test_halves_are_added_by_the_schedule_that_was_chosen_and_else_by_a_ring(comm, name):
    schedules = []
    for chosen in (Scheduled(comm, "binomial_tree"), comm):
        (bucket,) = buckets_of()
        sums = create_sums(name)(chosen)
        sums.prepare((bucket,))
        exchanged(chosen, sums, (bucket,), 0)
        (adder,) = sums._adders.values()
        schedules.append(adder.algorithm)
    assert schedules == ["binomial_tree", "ring"]


def above(limit: float, **options: Any) -> Compressor:
    """Send what is above a limit, and keep the rest (Strom 2015)."""

    def compress(x: np.ndarray, context: Context) -> tuple[np.ndarray, ...]:
        kept = np.flatnonzero(np.abs(x) > limit)
        return kept.astype("uint16"), x[kept]

    def restore(parts: tuple[np.ndarray, ...], out: np.ndarray, context: Context) -> None:
        out[parts[0]] += parts[1]

    return Compressor(compress, restore, **options)


@pytest.mark.threads(1, 2, 3)
@pytest.mark.mpi(2, 4)
def test_lengths_that_vary_are_exchanged(comm):
    buckets = buckets_of(bucket_bytes=SMALL)
    sums = above(0.1, varies=True)(comm)
    sums.prepare(buckets)
    for step in range(3):
        results = exchanged(comm, sums, buckets, step)
        for bucket, result in zip(buckets, results, strict=True):
            everything = [gradients(bucket, rank, step) for rank in range(comm.size)]
            for given, *arrays in zip(result, *everything, strict=True):
                total = np.zeros_like(given)
                for array in arrays:
                    total += np.where(np.abs(array) > 0.1, array, 0)
                np.testing.assert_array_equal(given, total)


def test_lengths_that_vary_without_a_word_are_refused():
    buckets = buckets_of()
    sums = above(0.1)(Serial())
    sums.prepare(buckets)
    exchanged(Serial(), sums, buckets, 0)
    with pytest.raises(ValueError, match=r"of lengths \[\d+, \d+\] as before, got .*varies=True"):
        exchanged(Serial(), sums, buckets, 1)


@each(
    ("answer", "shown"),
    [
        (lambda x, context: x, r"got an array of shape \(\d+,\); for one array return \(array,\)"),
        (lambda x, context: None, "got an object of type NoneType"),
        (lambda x, context: (x, 3), "got a tuple of .an array of shape .*, an object of type int"),
        (
            lambda x, context: (x.reshape(1, -1),),
            r"got a tuple of .* shape \(1, \d+\)",
        ),
    ],
)
def test_a_compressor_that_returns_no_flat_arrays_is_told_so(answer, shown):
    buckets = buckets_of()
    sums = Compressor(answer, lambda parts, out, context: None)(Serial())
    sums.prepare(buckets)
    with pytest.raises(TypeError, match=shown):
        sums.start(buckets[0])


def test_a_compressor_cannot_write_the_gradients():
    def compress(x: np.ndarray, context: Context) -> tuple[np.ndarray, ...]:
        x *= 2
        return (x,)

    buckets = buckets_of()
    sums = Compressor(compress, lambda parts, out, context: None)(Serial())
    sums.prepare(buckets)
    with pytest.raises(ValueError, match="read-only"):
        sums.start(buckets[0])


@pytest.mark.threads(1, 3)
def test_parts_may_be_the_gradients_themselves(comm):
    for adds in (False, True):
        plain = Compressor(
            lambda x, context: (x,),
            lambda parts, out, context: np.add(out, parts[0], out=out),
            adds=adds,
            feedback=True,
        )
        buckets = buckets_of(dtype="float64")
        sums = plain(comm)
        sums.prepare(buckets)
        for step in range(2):
            (result,) = exchanged(comm, sums, buckets, step)
            everything = [gradients(buckets[0], rank, step) for rank in range(comm.size)]
            for given, *arrays in zip(result, *everything, strict=True):
                np.testing.assert_allclose(given, sum(arrays), rtol=1e-14)  # order of the ranks


@each("case", [*ALL, ("power_sgd", {})])
def test_parameters_without_elements_do_no_harm(case):
    for shapes in ([(0,)], [(0, 3), (1,), (0,)], []):
        buckets = buckets_of(shapes)
        sums = create_sums(case[0], **case[1])(Serial())
        sums.prepare(buckets)
        for bucket in buckets:
            fill(bucket, gradients(bucket, 0, 0))
            sums.start(bucket).wait()
            assert len(read(bucket)) == len(bucket.parameters)
        sums.load(sums.state())


@each("case", [("top_k", {}), ("power_sgd", {"rank": 1})])
def test_a_state_of_something_else_is_refused(case):
    sums = create_sums(case[0], **case[1])(Serial())
    sums.prepare(buckets_of())
    with pytest.raises(ValueError, match="did not compress gradients; continue without --compress"):
        sums.load({})
    state = sums.state()
    missing = {name: value for name, value in state.items() if name != "error/p1"}
    other = state | {"error/p1": np.ones((5, 4), "float32")}
    before = sums.state()
    for wrong in (missing, other):
        with pytest.raises(
            ValueError, match=r"expected an array 'error/p1' of shape .* with the same compressor"
        ):
            sums.load(wrong)
    after = sums.state()
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.threads(1, 2, 3)
def test_the_bytes_on_the_wire_are_those_of_the_parts(comm):
    sizes = [array.size for array in gradients(buckets_of()[0], 0, 0)]
    n, blocks = sum(sizes), sum(-(-size // 64) for size in sizes)
    others = comm.size - 1
    share = 2 * others / comm.size  # of an allreduce
    for case, wanted in (
        (("int8", {"block": 64}), others * (blocks * 4 + n)),
        (("top_k", {"share": 0.1}), others * 8 * -(-n // 10)),
        (("sign", {"block": 64}), others * (-(-n // 8) + blocks * 4)),
        (("float", {"exponent": 5, "mantissa": 6}), others * (-(-12 * n // 8) + 2)),
        (("random_k", {"share": 0.1}), share * 4 * -(-n // 10)),
        (("float16", {}), share * 2 * n),
    ):
        buckets = buckets_of()
        sums = new_sums(comm, case)
        sums.prepare(buckets)
        exchanged(comm, sums, buckets, 0)  # once to find out what the communicator can add
        before = comm.traffic.bytes
        exchanged(comm, sums, buckets, 1)
        # Arrays in a message begin at a multiple of their element size, and rings cut by elements:
        # at most 8 B in each message.
        assert abs(comm.traffic.bytes - before - wanted) <= 8 * others
