"""Recycled memory: whose it is, what it holds, what is counted."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cpu import MemoryPool
from tests.each import each

LINE = 64
MIB = 1 << 20
LARGE = MIB // 4  # elements of float32 that make a MiB


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool()


@each("dtype", ["float32", np.float64, np.dtype("int32"), ">f4", "bool"])
@each("shape", [(), (0,), (3, 0, 2), (5,), (100, 1000), (2, 3, 5, 7000)])
def test_arrays_have_the_shape_and_type_asked_for(pool, shape, dtype):
    for array in (pool.empty(shape, dtype), pool.zeros(shape, dtype)):
        assert array.shape == shape
        assert array.dtype == np.dtype(dtype)
        assert array.flags.owndata
        assert array.flags.carray or array.dtype.byteorder == ">"
    assert not pool.zeros(shape, dtype).any()


def test_large_arrays_are_counted_while_they_or_their_views_are_alive(pool):
    small = pool.empty((pool.threshold - 1,), "uint8")
    assert pool.in_use == pool.held == 0
    large = pool.empty((pool.threshold,), "uint8")
    assert pool.in_use == large.nbytes == small.nbytes + 1
    a = pool.empty((1000, 100), "float32")
    assert pool.in_use == pool.peak == large.nbytes + 400_000
    view = a[10:20, ::3].T
    del a
    assert pool.in_use == pool.peak == large.nbytes + 400_000
    del view
    assert pool.in_use == large.nbytes
    assert pool.peak == large.nbytes + 400_000
    pool.reset_peak()
    assert pool.peak == large.nbytes


def test_memory_is_used_again_and_neighbours_that_are_free_become_one(pool):
    first = pool.empty((LARGE,), "float32").ctypes.data
    for _ in range(5):
        assert pool.empty((LARGE,), "float32").ctypes.data == first
    arrays = [pool.empty((LARGE,), "float32") for _ in range(6)]
    held = pool.held
    for i in (3, 1, 2):  # the one in the middle comes last and joins both sides
        arrays[i] = None
    whole = pool.empty((3 * LARGE,), "float32")
    assert pool.held == held
    del whole, arrays
    again = pool.empty((6 * LARGE,), "float32")
    assert pool.held == held
    assert again.nbytes == pool.in_use


def test_arrays_start_on_cache_lines_and_not_all_at_the_same_place_in_a_page(pool):
    addresses = [a.ctypes.data for a in [pool.empty((LARGE,), "float32") for _ in range(8)]]
    assert not any(address % LINE for address in addresses)
    assert len({address % 4096 for address in addresses}) == 8


def test_a_large_hole_is_kept_for_a_large_array(pool):
    def array(mib: int) -> np.ndarray:
        return pool.empty((mib * LARGE,), "float32")

    first, other = array(64), array(8)
    del first
    small = array(8)  # of backward, before the gradient of the first array
    assert pool.held < 81 * MIB
    gradient, rest = array(64), array(8)
    assert pool.held < 89 * MIB  # without the rule 138
    del gradient, small, rest
    part = array(13)  # is not small
    assert pool.held < 89 * MIB
    del part, other


def test_a_step_that_repeats_holds_no_more_than_it_uses(pool):
    rng = np.random.default_rng(0)
    sizes = rng.integers(pool.threshold, MIB, size=40)
    for _ in range(3):
        stack = [pool.empty((n,), "uint8") for n in sizes]
        while stack:
            gradient = pool.empty((stack[-1].nbytes,), "uint8")
            stack.pop()
            del gradient
    headers = LINE * 2 * (len(sizes) + 2)
    assert pool.peak <= pool.peak_held <= pool.peak + headers + 4096


def test_contents_survive_whatever_is_allocated_and_freed_around_them(pool):
    rng = np.random.default_rng(1)
    alive: list[tuple[np.ndarray, int]] = []
    for tag in range(2000):
        n = int(rng.integers(1, 4 * pool.threshold))
        make = pool.zeros if tag % 3 == 0 else pool.empty
        array = make((n,), "uint8")
        assert tag % 3 or not array.any()
        array.fill(tag % 251)
        alive.append((array, tag % 251))
        if len(alive) > 30:
            array, value = alive.pop(int(rng.integers(len(alive))))
            assert (array == value).all()
    assert pool.in_use == sum(a.nbytes for a, _ in alive if a.nbytes >= pool.threshold)


def test_threads_may_share_a_pool(pool):
    def work(tag: int) -> bool:
        rng = np.random.default_rng(tag)
        for _ in range(200):
            arrays = [pool.empty((int(rng.integers(1, MIB)),), "uint8") for _ in range(3)]
            for array in arrays:
                array.fill(tag)
            if not all((array == tag).all() for array in arrays):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert pool.in_use == 0


def test_an_array_may_outlive_its_pool():
    pool = MemoryPool()
    array = pool.zeros((LARGE,), "float32")
    view = array.reshape(2, -1)[1]
    del pool, array
    gc.collect()
    view += 1
    assert view.sum() == view.size


def test_an_array_that_is_resized_keeps_its_contents(pool):
    array = pool.empty((LARGE,), "float32")
    array[:] = np.arange(LARGE)
    array.resize((3 * LARGE,))
    np.testing.assert_array_equal(array[:LARGE], np.arange(LARGE))
    assert not array[LARGE:].any()
    assert pool.in_use == array.nbytes
    array.resize((10,))
    np.testing.assert_array_equal(array, np.arange(10))
    assert pool.in_use == 0
    array.resize((LARGE,))  # what malloc gave stays with malloc
    assert not array[10:].any()
    assert pool.in_use == 0


def test_numpy_allocates_from_the_pool_only_within_its_context(pool):
    x = np.ones(LARGE, "float32")
    with pytest.raises(ZeroDivisionError), pool.recycling():
        _ = 1 / 0
    np.ones(LARGE)
    assert pool.peak == 0
    with pool.recycling():
        y = x + x
        with ThreadPoolExecutor(1) as thread:  # a thread has a context of its own
            other = thread.submit(np.copy, x).result()
        assert pool.in_use == y.nbytes
    z = x + y
    assert pool.in_use == y.nbytes
    assert np.array_equal(z, 3 * other)


def test_each_cpu_backend_recycles_in_a_pool_of_its_own_and_the_reference_in_none():
    first, second, reference = create_backend("cpu"), create_backend("cpu"), create_backend("numpy")
    array = first.zeros((LARGE,), np.float32)
    assert first.memory.in_use == array.nbytes
    assert second.memory.in_use == 0
    for backend in (second, reference):
        with backend.recycling():
            x = np.ones(LARGE, "float32")
        assert x.sum() == LARGE
        assert backend.memory is None or backend.memory.in_use == x.nbytes
    assert reference.memory is None
    assert not reference.zeros((LARGE,), np.float32).any()


def test_trim_returns_what_lies_behind_the_last_array(pool):
    first, second, third = (pool.zeros((LARGE,), "float32") for _ in range(3))
    third.fill(9)
    held = pool.held
    del first, third
    pool.trim()
    assert pool.held == pytest.approx(held * 2 / 3, rel=1e-3)  # headers are the difference
    assert not pool.zeros((2 * LARGE,), "float32").any()  # in memory that third had
    del second
    pool.trim()
    assert pool.held == pool.in_use == 0
    assert pool.zeros((LARGE,), "float32").sum() == 0


def test_trimmed_memory_that_is_locked_reads_as_zeros(pool):
    first, second = (pool.empty((LARGE,), "float32") for _ in range(2))
    second.fill(9)
    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.c_void_p(second.ctypes.data), ctypes.c_size_t(second.nbytes)
    if libc.mlock(*memory) != 0:  # as mlockall does for a real-time or RDMA program
        pytest.skip("this user may not lock a MiB of memory")
    try:
        del second
        pool.trim()
        again = pool.zeros((LARGE,), "float32")
        assert not again.any()
    finally:
        libc.munlock(*memory)
    assert first.nbytes == MIB


def test_what_cannot_be_had_is_an_error_and_does_no_harm(pool):
    for make in (pool.empty, pool.zeros):
        with pytest.raises(MemoryError):
            make((1 << 60,), "uint8")
        with pytest.raises(ValueError, match="negative dimensions"):
            make((-1, 5), "float32")
    with pytest.raises(ValueError, match="at most 64 axes"):
        pool.empty((1,) * 65, "float32")
    assert pool.in_use == 0
    assert pool.zeros((LARGE,), "float32").sum() == 0
