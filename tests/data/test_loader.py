from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import (
    ArrayDataset,
    AutoAugment,
    Batch,
    ColorJitter,
    Cutout,
    Dataset,
    HorizontalFlip,
    Loader,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
)
from pydtnn.data.order import permutation
from tests.each import each

AUGMENT = (
    *(RandomCrop(2), RandomResizedCrop(0.3), HorizontalFlip(), ColorJitter(), RandAugment()),
    *(AutoAugment(), Cutout(2), RandomErasing()),
)


def loaders(
    dataset: Dataset, size: int, batch: int = 8, **options: Any
) -> Callable[[int], list[list[Batch]]]:
    """A function that gives all batches of an epoch: one list for each rank."""

    def batches(epoch: int) -> list[list[Batch]]:
        found = []
        for rank in range(size):
            with Loader(
                dataset, global_batch_size=batch, rank=rank, size=size, **options
            ) as loader:
                found.append(list(loader.epoch(epoch)))
        return found

    return batches


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_share_the_permutation_of_the_epoch_and_the_last_batch_has_the_rest(
    images: ArrayDataset, size: int
) -> None:
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


@pytest.mark.parametrize("size", [2, 3, 8])
def test_samples_and_their_augmentation_do_not_depend_on_the_number_of_ranks(
    images: ArrayDataset, size: int
) -> None:
    (alone,) = loaders(images, 1, seed=1, augment=AUGMENT)(2)
    ranks = loaders(images, size, seed=1, augment=AUGMENT)(2)
    for step, whole in enumerate(alone):
        x = np.concatenate([rank[step].x for rank in ranks])
        y = np.concatenate([rank[step].y for rank in ranks])
        assert x.tobytes() == whole.x.tobytes()
        np.testing.assert_array_equal(y, whole.y)


def test_a_sample_s_augmentation_changes_with_epoch_and_seed_but_not_with_the_batch(
    images: ArrayDataset,
) -> None:
    def by_sample(seed: int, epoch: int, batch: int) -> NDArray[np.float32]:
        (batches,) = loaders(images, 1, batch, seed=seed, augment=AUGMENT)(epoch)
        x = np.empty((23, 6, 5, 3), np.float32)
        for batch_ in batches:
            x[batch_.samples] = batch_.x
        return x

    one = by_sample(0, 0, 8)
    np.testing.assert_array_equal(by_sample(0, 0, 5), one)
    assert (by_sample(1, 0, 8) != one).any()
    assert (by_sample(0, 1, 8) != one).any()


def test_without_shuffling_the_order_is_the_data_s_and_some_ranks_get_nothing(
    images: ArrayDataset,
) -> None:
    part = images.subset(np.arange(9))
    ranks = loaders(part, 4, batch=8, shuffle=False)(0)
    assert [[len(batch) for batch in rank] for rank in ranks] == [[2, 1], [2, 0], [2, 0], [2, 0]]
    ids = np.concatenate([rank[0].samples for rank in ranks] + [ranks[0][1].samples])
    np.testing.assert_array_equal(ids, np.arange(9))
    empty = ranks[3][1]
    assert (empty.x.shape, empty.y.shape, empty.total) == ((0, 6, 5, 3), (0,), 1)
    (whole,) = loaders(part, 1, batch=100, shuffle=False)(0)
    assert [len(batch) for batch in whole] == [9]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_batches_are_normalised_contiguous_and_of_the_model_s_dtype(
    images: ArrayDataset, dtype: Any
) -> None:
    (batches,) = loaders(images, 1, dtype=dtype)(0)
    for batch in batches:
        assert batch.x.dtype == dtype
        assert batch.x.flags.c_contiguous
        assert batch.y.dtype == np.int64
    x = np.concatenate([batch.x for batch in batches]).astype(np.float64)
    # Mean 0 and deviation 1 of 690 numbers that were rounded to float32.
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=1e-6)


def test_float_targets_are_of_the_model_s_dtype(rng: np.random.Generator) -> None:
    data = ArrayDataset(rng.normal(size=(4, 3)), rng.normal(size=(4, 2)))
    (batches,) = loaders(data, 1, batch=4, dtype=np.float32)(0)
    assert batches[0].y.dtype == np.float32


@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (2, 1), (3, 4), (50, 2)])
def test_batches_do_not_depend_on_prefetching_or_threads(
    images: ArrayDataset, prefetch: int, threads: int
) -> None:
    (expected,) = loaders(images, 1, 3, augment=AUGMENT, prefetch=0)(1)
    (found,) = loaders(images, 1, 3, augment=AUGMENT, prefetch=prefetch, threads=threads)(1)
    assert [batch.index for batch in found] == list(range(8))
    for one, other in zip(expected, found, strict=True):
        assert one.x.tobytes() == other.x.tobytes()
        np.testing.assert_array_equal(one.samples, other.samples)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_an_epoch_goes_on_from_any_step(images: ArrayDataset, prefetch: int, start: int) -> None:
    with Loader(images, global_batch_size=8, augment=AUGMENT, prefetch=prefetch) as loader:
        whole = list(loader.epoch(4))
        rest = list(loader.epoch(4, start))
    assert [batch.index for batch in rest] == list(range(start, 3))
    for one, other in zip(whole[start:], rest, strict=True):
        assert one.x.tobytes() == other.x.tobytes()


def test_an_epoch_may_be_cut_short(images: ArrayDataset) -> None:
    (batches,) = loaders(images, 1, steps_per_epoch=2)(0)
    assert [batch.total for batch in batches] == [8, 8]


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

    def read(self, indices: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        self.go_on.wait(10)
        self.threads.add(threading.current_thread().name)
        self.reads += indices.tolist()
        if self.fails_at in indices:
            raise OSError("the disk is gone")
        return indices[:, None].astype(float), indices.astype(float)


def ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("pydtnn-loader")]


@each("prefetch", [0, 2])
def test_an_error_while_loading_is_raised_where_the_batch_is_taken(prefetch: int) -> None:
    data = Probe(6, fails_at=2)
    with Loader(data, global_batch_size=1, shuffle=False, prefetch=prefetch) as loader:
        batches = loader.epoch(0)
        assert [next(batches).samples[0] for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
    assert not ours()


def test_a_loader_reads_only_its_rank_s_samples_and_no_more_than_it_may_prefetch() -> None:
    data = Probe(40)
    with Loader(data, global_batch_size=4, rank=1, size=2, shuffle=False, prefetch=3) as loader:
        batches = loader.epoch(0)
        next(batches)
        # One batch taken and three ahead; the wait gives a loader that reads on the time to do so.
        deadline = time.monotonic() + 60
        while len(data.reads) < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert data.reads == [2, 3, 6, 7, 10, 11, 14, 15]
        assert len([*batches]) == 9


def test_without_prefetching_the_caller_reads_and_there_are_no_threads() -> None:
    data = Probe(4)
    with Loader(data, global_batch_size=2, prefetch=0) as loader:
        assert len(list(loader.epoch(0))) == 2
    assert data.threads == {threading.current_thread().name}


def test_leaving_an_epoch_early_and_closing_end_all_threads() -> None:
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


def test_closing_waits_for_a_batch_that_is_being_read_and_drops_the_others() -> None:
    data = Probe(100)
    data.go_on.clear()
    loader = Loader(data, global_batch_size=1, prefetch=10, shuffle=False)
    loader.epoch(0)
    threading.Timer(0.3, data.go_on.set).start()
    loader.close()
    assert not ours()
    assert data.reads == [0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"global_batch_size": 24}, "must be at most the 23 samples of images, got 24"),
        ({"global_batch_size": 0}, "global batch must be at least 1, got 0"),
        (
            {"global_batch_size": 3, "size": 4},
            r"one rank per sample of the global batch \(3\), got 4",
        ),
        ({"rank": 2, "size": 2}, "rank must be in 0..1, got 2"),
        ({"rank": -1}, "rank must be in 0..0, got -1"),
        ({"prefetch": -1}, "prefetch must be at least 0"),
        ({"threads": 0}, "threads at least 1"),
        ({"steps_per_epoch": 4}, "steps_per_epoch must be in 1..3 for 23 samples"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be in 1..3"),
    ],
)
def test_numbers_that_cannot_work_are_refused_in_one_sentence(
    images: ArrayDataset, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Loader(images, **{"global_batch_size": 8, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"dataset": np.zeros((4, 2))},
            r"expected a data set, got ndarray; .* ArrayDataset\(x, y\)",
        ),
        ({"global_batch_size": 2.5}, "the global batch must be a whole number, got 2.5"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        (
            {"augment": "flip"},
            "augment must be a list of augmentations, got 'flip'; use",
        ),
        ({"augment": [HorizontalFlip]}, "augment must be a list of augmentations"),
    ],
)
def test_what_is_of_another_type_is_refused_in_one_sentence(
    images: ArrayDataset, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TypeError, match=f"^Loader: {reason}"):
        Loader(**{"dataset": images, "global_batch_size": 8, **options})


def test_a_data_set_without_a_name_shape_or_classes_is_told() -> None:
    class Bare(Probe):
        @property
        def input_shape(self) -> Any:  # type: ignore[override]
            raise AttributeError

    with pytest.raises(TypeError, match="Loader: the data set Bare has no `input_shape`; set it"):
        Loader(Bare(4), global_batch_size=2)


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
def test_a_data_set_that_reads_something_else_than_it_promises_is_told(
    result: Any, reason: str
) -> None:
    class Wrong(Probe):
        def read(self, indices: NDArray[Any]) -> Any:
            return result

    with (
        Loader(Wrong(3), global_batch_size=3) as loader,
        pytest.raises((TypeError, ValueError), match=f"^probe: .*{reason}"),
    ):
        next(loader.epoch(0))


def test_a_data_set_is_never_asked_for_nothing() -> None:
    class Stacks(Probe):
        def read(self, indices: NDArray[Any]) -> Any:
            return np.stack([np.full(1, i, "float32") for i in indices]), indices.astype(float)

    with Loader(Stacks(3), global_batch_size=2, rank=1, size=2, shuffle=False) as loader:
        first, last = loader.epoch(0)
    assert (first.x.shape, last.x.shape, last.y.shape) == ((1, 1), (0, 1), (0,))
    assert (last.x.dtype, last.y.dtype) == (np.float32, np.float32)


def test_floats_that_are_said_to_be_pixels_are_told() -> None:
    class Floats(Probe):
        pixels = True

    with pytest.raises(TypeError, match="expected uint8 pixels, got float64; .* `pixels = False`"):
        Loader(Floats(4), global_batch_size=2)


def test_data_that_are_no_images_are_not_augmented(rng: np.random.Generator) -> None:
    data = ArrayDataset(rng.normal(size=(4, 3)), [0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"augmentation requires images .* shape \(3,\)"):
        Loader(data, global_batch_size=2, augment=AUGMENT)


def test_a_loader_without_samples_is_refused(images: ArrayDataset) -> None:
    with pytest.raises(ValueError, match="expected at least one sample, got none in images"):
        Loader(images.subset([]), global_batch_size=1)


@pytest.mark.parametrize(("epoch", "start"), [(-1, 0), (0, -1), (0, 4)])
def test_an_epoch_or_step_that_does_not_exist_is_refused(
    images: ArrayDataset, epoch: int, start: int
) -> None:
    with (
        Loader(images, global_batch_size=8) as loader,
        pytest.raises(ValueError, match=r"epoch must be at least 0 and start in 0\.\.3"),
    ):
        loader.epoch(epoch, start)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_of_a_batch_hold_the_same_samples_for_any_number_of_ranks(
    images: ArrayDataset, size: int
) -> None:
    def shards(ranks: int) -> dict[tuple[int, int | None], list[int]]:
        found = {}
        for rank in range(ranks):
            with Loader(images, global_batch_size=10, rank=rank, size=ranks, shards=4) as loader:
                for batch in loader.epoch(0):
                    assert batch.total == min(10, len(images) - 10 * batch.index)
                    for number, rows in batch.shards:
                        found[batch.index, number] = batch.samples[rows].tolist()
        return found

    assert shards(size) == shards(1)


def test_more_ranks_than_shards_are_refused(images: ArrayDataset) -> None:
    with pytest.raises(ValueError, match=r"as many ranks as shards \(2\), got 3; use"):
        Loader(images, global_batch_size=10, rank=0, size=3, shards=2)
