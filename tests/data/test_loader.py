from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import (
    AlternatingFlip,
    Batch,
    ColorJitter,
    Cutout,
    Dataset,
    Loader,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
)
from pydtnn.data.order import permutation
from tests.each import each
from tests.ranks import wait_for

AUGMENT = (
    *(RandomCrop(2), RandomResizedCrop(0.3), AlternatingFlip(), ColorJitter(), RandAugment()),
    *(Cutout(2), RandomErasing()),
)


def loaders(
    dataset: Dataset, size: int, batch: int = 8, **options: Any
) -> Callable[[int], list[list[Batch]]]:
    """A function that gives all batches of an epoch: one list for each rank."""

    def batches(epoch: int) -> list[list[Batch]]:
        given = {"global_batch_size": batch, "size": size, **options}
        found = []
        for rank in range(size):
            with Loader(dataset, rank=rank, **given) as loader:
                found.append(list(loader.epoch(epoch)))
        return found

    return batches


@each("size", [1, 3, 8])
def test_ranks_share_the_permutation_of_the_epoch_and_the_last_batch_has_the_rest(images, size):
    ranks = loaders(images, size, seed=7)(3)
    order = permutation(7, 3, 23)
    for step in range(3):
        batches = [rank[step] for rank in ranks]
        assert [batch.index for batch in batches] == [step] * size
        assert [batch.total for batch in batches] == [min(8, 23 - 8 * step)] * size
        ids = np.concatenate([batch.samples for batch in batches])
        np.testing.assert_array_equal(ids, order[8 * step : 8 * step + 8])
        lengths = [len(batch) for batch in batches]
        assert max(lengths) - min(lengths) <= 1


def test_augmentation_changes_with_epoch_and_seed_but_not_with_batches_ranks_or_threads(images):
    def by_sample(seed: int, epoch: int, batch: int = 8, size: int = 1, **more: Any) -> Any:
        x = np.empty((23, 6, 5, 3), np.float32)
        for rank in loaders(images, size, batch, seed=seed, augment=AUGMENT, **more)(epoch):
            for one in rank:
                x[one.samples] = one.x
                np.testing.assert_array_equal(one.y, images.y[one.samples])
        return x

    one = by_sample(0, 0)
    for same in ({"batch": 5}, {"size": 3}, {"batch": 3, "prefetch": 0}, {"prefetch": 50}):
        np.testing.assert_array_equal(by_sample(0, 0, **same), one)
        np.testing.assert_array_equal(by_sample(0, 0, threads=4, **same), one)
    assert (by_sample(1, 0) != one).any()
    assert (by_sample(0, 1) != one).any()


def test_alternating_flips_mirror_every_image_from_one_epoch_to_the_next(images):
    epoch = loaders(images, 1, batch=23, shuffle=False, augment=[AlternatingFlip()])
    first, second, third = (epoch(number)[0][0].x for number in range(3))
    np.testing.assert_array_equal(second, first[:, :, ::-1])
    np.testing.assert_array_equal(third, first)
    plain = loaders(images, 1, batch=23, shuffle=False)(0)[0][0].x
    assert 0 < (plain != first).any((1, 2, 3)).sum() < 23


def test_without_shuffling_the_order_is_the_data_s_and_some_ranks_get_nothing(images):
    part = images.subset(np.arange(9))
    ranks = loaders(part, 4, batch=8, shuffle=False)(0)
    assert [[len(batch) for batch in rank] for rank in ranks] == [[2, 1], [2, 0], [2, 0], [2, 0]]
    ids = np.concatenate([rank[0].samples for rank in ranks] + [ranks[0][1].samples])
    np.testing.assert_array_equal(ids, np.arange(9))
    empty = ranks[3][1]
    assert (empty.x.shape, empty.y.shape, empty.total) == ((0, 6, 5, 3), (0,), 1)
    assert (empty.x.dtype, empty.y.dtype) == (np.float32, np.int64)
    numbers = loaders(Probe(9), 4, batch=8)(0)[3][1]  # `Probe.read` is never asked for nothing
    assert (numbers.x.shape, numbers.y.dtype) == ((0, 1), np.float32)
    (whole,) = loaders(part, 1, batch=100, shuffle=False)(0)
    assert [len(batch) for batch in whole] == [9]


@each("dtype", [np.float32, np.float64])
def test_batches_are_normalised_contiguous_and_of_the_model_s_dtype(images, dtype):
    (batches,) = loaders(images, 1, dtype=dtype)(0)
    for batch in batches:
        assert batch.x.flags.c_contiguous
        assert (batch.x.dtype, batch.y.dtype) == (dtype, np.int64)
    x = np.concatenate([batch.x for batch in batches]).astype(np.float64)
    # Mean 0 and deviation 1 of 690 numbers that were rounded to float32.
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=1e-6)


@each("prefetch", [0, 2])
@each("start", [0, 1, 3])
def test_an_epoch_goes_on_from_any_step(images, prefetch, start):
    with Loader(images, global_batch_size=8, augment=AUGMENT, prefetch=prefetch) as loader:
        whole = list(loader.epoch(4))
        rest = list(loader.epoch(4, start))
    assert [batch.index for batch in rest] == list(range(start, 3))
    for one, other in zip(whole[start:], rest, strict=True):
        assert one.x.tobytes() == other.x.tobytes()
    (short,) = loaders(images, 1, steps_per_epoch=2)(4)
    np.testing.assert_array_equal(short[-1].samples, whole[1].samples)
    assert len(short) == 2


class Probe(Dataset):
    """Data that say who reads them, fail at a sample, or wait until they are told to go on."""

    name, input_shape, classes, pixels = "probe", (1,), None, False

    def __init__(self, n: int, fails_at: int | None = None) -> None:
        self.n, self.fails_at = n, fails_at
        self.threads: set[str] = set()
        self.reads: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __len__(self) -> int:
        return self.n

    def read(self, indices: NDArray[Any]) -> Any:
        self.threads.add(threading.current_thread().name)
        self.go_on.wait(300)
        assert len(indices)  # a data set is never asked for nothing
        self.reads += indices.tolist()
        if self.fails_at in indices:
            raise OSError("the disk is gone")
        return indices[:, None].astype(float), indices.astype(float)


def ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("pydtnn-loader")]


@each("prefetch", [0, 2])
def test_an_error_while_loading_is_raised_where_the_batch_is_taken(prefetch):
    data = Probe(6, fails_at=2)
    with Loader(data, global_batch_size=1, shuffle=False, prefetch=prefetch) as loader:
        batches = loader.epoch(0)
        assert [next(batches).samples[0] for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
    assert not ours()
    assert (data.threads == {threading.current_thread().name}) == (prefetch == 0)


def test_a_loader_reads_only_its_rank_s_samples_and_no_more_than_it_may_prefetch():
    data = Probe(40)
    with Loader(data, global_batch_size=4, rank=1, size=2, shuffle=False, prefetch=3) as loader:
        batches = loader.epoch(0)
        next(batches)
        wait_for(lambda: len(data.reads) >= 8)
        assert data.reads == [2, 3, 6, 7, 10, 11, 14, 15]  # one batch taken and three ahead
        assert len([*batches]) == 9


def test_leaving_an_epoch_early_and_closing_end_all_threads():
    data = Probe(100)
    loader = Loader(data, global_batch_size=1, prefetch=4, threads=3)
    for batch in loader.epoch(0):
        if batch.index == 2:
            break
    assert ours()
    assert len(list(loader.epoch(1))) == 100
    loader.epoch(2)  # never taken
    loader.close()
    loader.close()
    assert not ours()


def test_closing_waits_for_a_batch_that_is_being_read_and_drops_the_others():
    data = Probe(100)
    data.go_on.clear()
    loader = Loader(data, global_batch_size=1, prefetch=10, shuffle=False)
    loader.epoch(0)
    wait_for(lambda: data.threads)
    waiting = loader._pool._work_queue.qsize
    threading.Thread(target=lambda: (wait_for(lambda: waiting() < 2), data.go_on.set())).start()
    loader.close()
    assert not ours()
    assert data.reads == [0]


class Bare(Probe):
    @property
    def input_shape(self) -> Any:  # type: ignore[override]
        raise AttributeError


class Floats(Probe):
    pixels = True


@each(
    ("options", "reason"),
    [
        ({"global_batch_size": 24}, "must be at most the 23 samples of images, got 24"),
        ({"global_batch_size": 0}, "global batch must be at least 1, got 0"),
        ({"size": 9}, r"one rank per sample of the global batch \(8\), got 9"),
        ({"rank": 2, "size": 2}, "rank must be at most 1, got 2"),
        ({"size": 3, "shards": 2}, r"as many ranks as shards \(2\), got 3; use"),
        ({"prefetch": -1}, "prefetch must be at least 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"steps_per_epoch": 4}, "steps_per_epoch must be in 1..3 for 23 samples"),
        ({"dataset": np.zeros((4, 2))}, r"expected a data set, got ndarray; .* ArrayDataset"),
        ({"global_batch_size": 2.5}, "the global batch must be a whole number, got 2.5"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"augment": "flip"}, "augment must be a list of augmentations, got 'flip'; use"),
        ({"augment": [AlternatingFlip]}, "augment must be a list of augmentations"),
        ({"dataset": Probe(9), "augment": AUGMENT}, r"requires images .* shape \(1,\)"),
        ({"dataset": Probe(0)}, "expected at least one sample, got none in probe"),
        ({"dataset": Bare(9)}, "the data set Bare has no `input_shape`; set it"),
        ({"dataset": Floats(9)}, "expected uint8 pixels, got float64; .* `pixels = False`"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(images, options, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        Loader(**{"dataset": images, "global_batch_size": 8, **options})


@each(
    ("result", "reason"),
    [
        (np.zeros((3, 1)), r"read must return a pair of arrays \(x, y\), got ndarray"),
        ((np.zeros((2, 1)), np.zeros(2)), r"x of shape \(3, 1\) and .*, got \(2, 1\) and \(2,\)"),
        ((np.zeros((1, 3)), np.zeros(3)), r"x of shape \(3, 1\) and .*, got \(1, 3\) and \(3,\)"),
        ((np.zeros((3, 1)), np.zeros(2)), r"got \(3, 1\) and \(2,\)"),
        ((np.zeros((3, 1)), 0), r"got \(3, 1\) and \(\)"),
    ],
)
def test_a_data_set_that_reads_something_else_than_it_promises_is_told(result, reason):
    data = Probe(3)
    with Loader(data, global_batch_size=3) as loader:
        data.read = lambda indices: result  # type: ignore[method-assign]
        with pytest.raises((TypeError, ValueError), match=f"^probe: .*{reason}"):
            next(loader.epoch(0))


@each(("epoch", "start"), [(-1, 0), (0, -1), (0, 4)])
def test_an_epoch_or_step_that_does_not_exist_is_refused(images, epoch, start):
    with (
        Loader(images, global_batch_size=8) as loader,
        pytest.raises(ValueError, match=r"epoch must be at least 0 and start in 0\.\.3"),
    ):
        loader.epoch(epoch, start)


def test_shards_of_a_batch_hold_the_same_samples_for_any_number_of_ranks(images):
    def shards(ranks: int) -> dict[tuple[int, int | None], list[int]]:
        found = {}
        for batches in loaders(images, ranks, 10, shards=4)(0):
            for batch in batches:
                assert batch.total == min(10, len(images) - 10 * batch.index)
                for number, rows in batch.shards:
                    found[batch.index, number] = batch.samples[rows].tolist()
        return found

    assert shards(1) == shards(2) == shards(3)
    for rank in range(3):
        with Loader(images, global_batch_size=10, rank=rank, size=3, shards=4) as loader:
            loader.equal_numbers = True
            assert {len(batch.shards) for batch in loader.epoch(0)} == {2}
