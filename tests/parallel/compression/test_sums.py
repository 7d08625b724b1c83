"""Compressed sums over ranks: what arrives, what is kept, what travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.compression import CompressedSums, Compressor, Context, create_sums
from tests.each import each
from tests.parallel.compression.cases import buckets_of, exchanged, fill, gradients, padding, read

SMALL = 1 << 9
"""Bytes of a bucket, so that there are several."""

ALL: list[tuple[str, dict[str, Any]]] = [
    ("float16", {}),
    ("bfloat16", {"feedback": True}),
    ("int8", {"block": 64}),
    ("int8", {"block": 64, "feedback": True}),
    ("top_k", {"share": 0.1}),
    ("random_k", {"share": 0.1, "feedback": False}),
    ("random_k", {"share": 0.1, "feedback": True}),
    ("sign", {"block": 64}),
]
LOW_RANK = ("power_sgd", {"rank": 1})


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


@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@each("dtype", ["float32", "float64"])
@each("case", ALL)
def test_sums_are_those_of_what_each_rank_sends_on_all_ranks(comm, case, dtype):
    buckets, steps = buckets_of(dtype=dtype, bucket_bytes=SMALL), 3
    assert len(buckets) > 1
    sums = new_sums(comm, case)
    sums.prepare(buckets)
    for step in range(steps):
        results = exchanged(comm, sums, buckets, step)
    own = [bucket.grads.tobytes() for bucket in buckets]
    assert all(other == own for other in comm.gather_object(own))
    for bucket, result in zip(buckets, results, strict=True):
        assert not padding(bucket).any()
        for given, wanted in zip(result, expected(sums, bucket, comm.size, steps), strict=True):
            if sums.compressor.adds:  # in another order; the halves are rounded after each addition
                unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(case[0], 2.0**-23)
                # of partial sums, which are as large as the ranks' values
                atol = 2 * comm.size**2 * unit * max(np.abs(wanted).max(), np.abs(given).max(), 4)
                np.testing.assert_allclose(given, wanted, rtol=0, atol=atol)
            else:
                np.testing.assert_array_equal(given, wanted)


@pytest.mark.threads(2)
@each("case", [*ALL, LOW_RANK])
def test_all_ranks_get_the_same_bytes_and_a_saved_state_continues_in_them(comm, case):
    buckets = buckets_of(bucket_bytes=SMALL)
    whole, parts = (create_sums(case[0], **case[1])(comm) for _ in range(2))

    def steps(sums):
        found = []
        for step in (2, 3):
            exchanged(comm, sums, buckets, step)
            found += [bucket.grads.tobytes() for bucket in buckets]
        return found

    whole.prepare(buckets)
    for step in range(2):
        exchanged(comm, whole, buckets, step)
    state, straight = whole.state(), steps(whole)
    parts.prepare(buckets)
    parts.load(state)
    assert steps(parts) == straight
    assert all(other == straight for other in comm.gather_object(straight))


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


@pytest.mark.threads(3)
@pytest.mark.mpi(2)
@each("case", [*ALL, LOW_RANK])
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


def above(limit: float, **options: Any) -> Compressor:
    """Send what is above a limit, and keep the rest (Strom 2015)."""

    def compress(x: np.ndarray, context: Context) -> tuple[np.ndarray, ...]:
        kept = np.flatnonzero(np.abs(x) > limit)
        return kept.astype("uint16"), x[kept]

    def restore(parts: tuple[np.ndarray, ...], out: np.ndarray, context: Context) -> None:
        out[parts[0]] += parts[1]

    return Compressor(compress, restore, **options)


@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
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


def in_place(x: np.ndarray, context: Context) -> tuple[np.ndarray, ...]:
    x *= 2
    return (x,)


@each(
    ("compress", "error", "words"),
    [
        (lambda x, context: x, TypeError, r"an array of shape .*; for one array return \(array,"),
        (lambda x, context: None, TypeError, "got an object of type NoneType"),
        (lambda x, context: (x, 3), TypeError, "a tuple of .an array .*, an object of type int"),
        (lambda x, context: (x[None],), TypeError, r"got a tuple of .* shape \(1, \d+\)"),
        (in_place, ValueError, "read-only"),
        (
            lambda x, context: (x[: context.step + 1],),
            ValueError,
            r"of lengths \[1\] as before, got .*varies=True",
        ),
    ],
)
def test_a_compressor_that_returns_something_else_is_told_so(compress, error, words):
    buckets = buckets_of()
    sums = Compressor(compress, lambda parts, out, context: None)(Serial())
    sums.prepare(buckets)
    with pytest.raises(error, match=words):
        [sums.start(buckets[0]).wait() for _ in range(2)]


@each("case", [*ALL, LOW_RANK])
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


@each("case", [("top_k", {}), LOW_RANK])
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
