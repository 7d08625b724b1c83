"""PowerSGD against its definition, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.parallel.compression import PowerSGD
from pydtnn.parallel.compression.low_rank import power_sgd
from tests.each import each
from tests.parallel.compression.cases import buckets_of, exchanged, fill, gradients, padding, read

MATRICES = [(12, 3, 3, 2), (7,), (9, 13), (17, 8), (31,)]
SMALL = 1 << 10


def new_sums(comm: Communicator, buckets: Any, rank: int) -> PowerSGD:
    sums = PowerSGD(comm, rank=rank, seed=5)
    sums.prepare(buckets)
    return sums


@pytest.mark.threads(1, 2, 3)
@pytest.mark.mpi(2, 3)
@each("rank", [1, 2, 4])
def test_sums_follow_the_paper(comm, rank):
    """Vogels et al. 2019, algorithms 1 and 2, with sums instead of means."""
    buckets = buckets_of(MATRICES, "float64", SMALL)
    sums = new_sums(comm, buckets, rank)
    state = sums.state()
    q = {name[2:]: array for name, array in state.items() if name.startswith("q/")}
    assert len(q) == 3
    errors = [{name: np.zeros(()) for name in q} for _ in range(comm.size)]
    for step in range(3):
        results = exchanged(comm, sums, buckets, step)
        for bucket, result in zip(buckets, results, strict=True):
            ranks = [gradients(bucket, r, step) for r in range(comm.size)]
            for entry, given, *arrays in zip(bucket.parameters, result, *ranks, strict=True):
                if entry.name not in q:
                    np.testing.assert_allclose(given, sum(arrays), rtol=1e-13)
                    continue
                n = entry.shape[0]
                m = [e[entry.name] + a.reshape(n, -1) for e, a in zip(errors, arrays, strict=True)]
                p, _ = np.linalg.qr(sum(m) @ q[entry.name])
                parts = [one.T @ p for one in m]
                for error, one, part in zip(errors, m, parts, strict=True):
                    error[entry.name] = one - p @ part.T
                q[entry.name] = sum(parts)
                wanted = (p @ q[entry.name].T).reshape(entry.shape)
                # Only the space that p spans matters, and rounding turns it by about 1e-16 times
                # the ratio of singular values.
                np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-11 * np.abs(wanted).max())
    kept = sums.state()
    for name, error in errors[comm.rank].items():
        np.testing.assert_allclose(kept[f"error/{name}"], error, rtol=0, atol=1e-11)
    assert not any(padding(bucket).any() for bucket in buckets)


def test_a_gradient_of_zero_or_of_any_size_is_no_problem():
    (bucket,) = buckets_of([(8, 9)])
    sums = new_sums(Serial(), (bucket,), 1)
    for factor in (0.0, 1.0, 0.0, 1e30, 1e30, 1e-40):
        fill(bucket, [np.outer(np.arange(1, 9), np.arange(1, 10)) * factor])
        sums.start(bucket).wait()
        assert np.isfinite(bucket.grads).all()
    fill(bucket, [np.full((8, 9), np.nan)])
    sums.start(bucket).wait()
    assert np.isnan(read(bucket)[0]).all()


@pytest.mark.threads(1, 2, 3)
def test_the_bytes_on_the_wire_are_those_of_two_thin_matrices(comm):
    buckets = buckets_of(MATRICES)
    sums = new_sums(comm, buckets, 2)
    before = comm.traffic.bytes
    exchanged(comm, sums, buckets, 0)
    numbers = 2 * (12 + 18 + 9 + 13 + 17 + 8) + 7 + 31
    share = 2 * (comm.size - 1) / comm.size  # of an allreduce
    assert abs(comm.traffic.bytes - before - share * 4 * numbers) <= 1  # two calls are rounded


@pytest.mark.long
@pytest.mark.mpi(2, checked=False)
@each("again", [False, True])
def test_more_trainings_than_mpi_has_groups_for_may_follow_each_other(comm, again):
    """MPICH has some 2,000, of which each training takes two."""
    sums = power_sgd()(comm)
    for _ in range(1200):
        sums = sums if again else power_sgd()(comm)
        sums.prepare(())
    sums.free()
    sums.free()  # without effect
    assert not sums.groups
