"""Loaders in random configurations: what each rank, thread and resume sees of an epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pydtnn.data import (
    ArrayDataset,
    Augmentation,
    Batch,
    ColorJitter,
    CutMix,
    Cutout,
    Dataset,
    HorizontalFlip,
    Loader,
    Mixing,
    Mixup,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    split_validation,
)
from tests.random_cases import Case


@dataclass(frozen=True)
class Options:
    """What a loader is made of; `prefetch`, `threads`, `size` and `shards` must change nothing."""

    dataset: Dataset
    global_batch_size: int
    seed: int
    shuffle: bool
    augment: tuple[Augmentation, ...]
    mix: tuple[Mixing, ...]
    targets: str
    dtype: str
    steps_per_epoch: int | None
    size: int = 1
    shards: int | None = None
    prefetch: int = 0
    threads: int = 1

    def batches(self, rank: int, epoch: int, start: int = 0) -> list[Batch]:
        with Loader(rank=rank, **vars(self)) as loader:
            return list(loader.epoch(epoch, start))

    def elsewhere(self, rng: np.random.Generator) -> Options:
        """The same batches on other ranks."""
        size = int(rng.integers(1, min(self.global_batch_size, 9) + 1))
        return replace(
            self,
            size=size,
            shards=None if rng.random() < 0.5 else size + int(rng.integers(0, 20)),
            prefetch=int(rng.integers(0, 4)),
            threads=int(rng.integers(1, 4)),
        )


def random_dataset(rng: np.random.Generator) -> ArrayDataset:
    """Pixels, images of floats or vectors, with labels or other targets."""
    n, images = int(rng.integers(1, 60)), rng.random() < 0.7
    shape = (n, *rng.integers(1, 7, 3)) if images else (n, int(rng.integers(1, 5)))
    x: Any = rng.normal(size=shape).astype(rng.choice(["float32", "float64"]))
    if rng.random() < 0.5:
        x = rng.integers(0, 256, shape, np.uint8)
    y: Any = np.arange(n)  # tells which sample it is
    if images and rng.random() < 0.3:
        return ArrayDataset(x, rng.integers(0, 5, x.shape[:3]), classes=5)  # masks
    return ArrayDataset(x, y if rng.random() < 0.7 else y[:, None] + np.zeros(2))


def random_options(rng: np.random.Generator) -> Options:
    dataset: Dataset = random_dataset(rng)
    if len(dataset) > 1 and rng.random() < 0.4:
        dataset = split_validation(dataset, float(rng.uniform(0.01, 0.99)), int(rng.integers(9)))[0]
    shuffle = bool(rng.random() < 0.8)
    batch = int(rng.integers(1, len(dataset) + (1 if shuffle else 9)))
    widest = min(3, *dataset.input_shape[:2])
    kinds = [
        RandomCrop(int(rng.integers(1, widest + 1))),
        HorizontalFlip(),
        Cutout(int(rng.integers(1, 5))),
        RandomResizedCrop(0.1),
        RandomErasing(),
    ]
    images = len(dataset.input_shape) == 3
    if images and dataset.pixels and dataset.input_shape[-1] in (1, 3):
        kinds += [ColorJitter(), RandAugment(2, 20)]
    chosen = [kinds[i] for i in rng.permutation(len(kinds))[: rng.integers(0, 4)]]
    _, y = dataset.read(np.arange(1))
    mixings = [Mixup(0.3), CutMix()][: 1 + images] if y.ndim == 1 else []
    mix = mixings if dataset.classes is not None and rng.random() < 0.3 else []
    steps = -(-len(dataset) // batch)
    return Options(
        dataset,
        batch,
        int(rng.integers(1 << 40)),
        shuffle,
        tuple(chosen) if images else (),
        tuple(mix),
        "unchanged" if dataset.classes is None else "moved",
        str(rng.choice(["float32", "float64", "float16"])),
        None if rng.random() < 0.5 else int(rng.integers(1, steps + 1)),
    )


def joined(ranks: list[list[Batch]]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Samples, inputs and targets of every step, put together from all ranks."""
    return [
        tuple(
            np.concatenate(arrays)
            for arrays in zip(*((b.samples, b.x, b.y) for b in step), strict=True)
        )
        for step in zip(*ranks, strict=True)
    ]


def assert_same(ours: Any, expected: Any) -> None:
    assert len(ours) == len(expected)
    for step, other in zip(ours, expected, strict=True):
        for a, b in zip(step, other, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()


def assert_shards_cover(batches: list[Batch]) -> None:
    """Every row of a rank lies in one of its shards, in order."""
    for batch in batches:
        rows = [row for shard in batch.shards for row in range(len(batch))[shard.rows]]
        assert rows == list(range(len(batch)))


def check_split(case: Case, dataset: Dataset) -> None:
    """A validation split and what is left are all samples once, and the same for the same seed."""
    fraction, seed = float(case.rng.uniform(1e-6, 1 - 1e-6)), int(case.rng.integers(1 << 40))
    parts = split_validation(dataset, fraction, seed)
    for part, other in zip(parts, split_validation(dataset, fraction, seed), strict=True):
        case.compare(np.testing.assert_array_equal, part.indices, other.indices)
    both = sorted([*parts[0].indices, *parts[1].indices])
    case.compare(np.testing.assert_array_equal, both, np.arange(len(dataset)))
    wanted = min(max(fraction * len(dataset), 1), len(dataset) - 1)
    case.compare(np.testing.assert_allclose, len(parts[1]), wanted, atol=0.5)


@pytest.mark.fuzz("distributed")
def test_ranks_threads_and_a_resume_change_nothing_of_an_epoch(cases):
    for case in cases:
        options, epoch = random_options(case.rng), int(case.rng.integers(0, 1 << 20))
        n, b = len(options.dataset), options.global_batch_size
        expected = joined([options.batches(0, epoch)])
        seen = np.concatenate([samples for samples, _, _ in expected]).tolist()
        case.compare(np.testing.assert_equal, len(seen), len({*seen}))  # none twice
        case.compare(np.testing.assert_equal, len(seen), min(n, b * (options.steps_per_epoch or n)))
        case.compare(np.testing.assert_equal, options.shuffle or seen == sorted(seen), True)
        for samples, x, y in expected:
            raw, targets = options.dataset.read(samples)
            if options.mix:
                continue
            if not any(change.moves for change in options.augment) or targets.ndim < 3:
                case.compare(np.testing.assert_array_equal, y, targets)
            case.compare(np.testing.assert_equal, (y.shape, y.max() < 60), (targets.shape, True))
            if not options.augment:
                plain = options.dataset.normalize(raw, options.dtype)
                case.compare(np.testing.assert_array_equal, x, plain)
        start = int(case.rng.integers(0, len(expected) + 1))
        for begin in (0, start):
            way = options.elsewhere(case.rng)
            ranks = [way.batches(rank, epoch, begin) for rank in range(way.size)]
            case.compare(assert_same, joined(ranks), expected[begin:])
            for batches in ranks:
                case.compare(assert_shards_cover, batches)
        if n > 1:
            check_split(case, options.dataset)
