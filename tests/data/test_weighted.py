"""Samples drawn by weight: how often, the same for any number of ranks, repetitions."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pydtnn.data import ArrayDataset, Loader, TokenDataset, WeightedDataset, balanced_weights
from pydtnn.data.augment import create_augmentations
from tests.each import each

RNG = np.random.default_rng(0)
IMAGES = ArrayDataset(
    RNG.integers(0, 256, (40, 6, 6, 1)).astype(np.uint8), np.arange(40) % 10 // 8, classes=2
)


def drawn(dataset: WeightedDataset, epochs: int = 1) -> np.ndarray:
    """The samples of several epochs."""
    orders = [dataset.shuffled(3, epoch) for epoch in range(epochs)]
    return np.concatenate(orders) % len(dataset.indices)


def test_samples_are_drawn_as_often_as_their_weights_say():
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    data = ArrayDataset(np.zeros((6, 2)), np.arange(6))
    counts = np.bincount(drawn(WeightedDataset(data, weights, 8000), 10), minlength=6)
    assert not counts[weights == 0].any()
    # the standard deviation of a count is at most sqrt(80000 / 4) = 141
    np.testing.assert_allclose(counts, 80000 * weights / 8, atol=600)


def test_classes_are_balanced_and_epochs_and_seeds_differ_and_are_repeatable():
    data = WeightedDataset(IMAGES)
    counts = np.bincount(IMAGES.y[drawn(data, 100)])
    np.testing.assert_allclose(counts, [2000, 2000], atol=150)  # 5 standard deviations
    np.testing.assert_array_equal(data.shuffled(1, 2), WeightedDataset(IMAGES).shuffled(1, 2))
    assert (data.shuffled(1, 2) != data.shuffled(1, 3)).any()
    assert (data.shuffled(1, 2) != data.shuffled(2, 2)).any()


@each("length", [None, 17, 95])
def test_ranks_share_one_order_which_continues_at_any_step(length):
    data = WeightedDataset(IMAGES, np.arange(40.0), length)

    def batches(size: int, start: int = 0) -> list[np.ndarray]:
        loaders = [Loader(data, global_batch_size=8, rank=r, size=size) for r in range(size)]
        parts = zip(*(loader.epoch(1, start) for loader in loaders), strict=True)
        return [np.concatenate([part.x for part in step]) for step in parts]

    whole = batches(1)
    assert sum(map(len, whole)) == (length or 40) == len(data)
    for size in (2, 3):
        for own, expected in zip(batches(size), whole, strict=True):
            np.testing.assert_array_equal(own, expected)
    for own, expected in zip(batches(2, start=1), whole[1:], strict=True):
        np.testing.assert_array_equal(own, expected)


def test_each_repetition_of_a_sample_is_augmented_in_another_way():
    data = WeightedDataset(IMAGES, np.eye(40)[7], 64)
    order = data.shuffled(0, 0)
    assert len(set(order.tolist())) == 64
    assert set(order % 40) == {7}
    augment = create_augmentations("crop:2,flip")
    (batch,) = Loader(data, global_batch_size=64, augment=augment).epoch(0)
    assert len({image.tobytes() for image in batch.x}) > 10
    assert (batch.y == IMAGES.y[7]).all()
    np.testing.assert_array_equal(data.mean, IMAGES.mean)


@each(
    ("weights", "reason"),
    [
        (
            np.ones(39),
            "weights must be 40 finite numbers of at least 0, some above 0, one for each",
        ),
        (-np.ones(40), "got [-1.] in an array of shape (40,)"),
        (np.full(40, np.nan), "got [nan] in an array"),
        (np.zeros(40), "some above 0"),
        ("rare", "weights must be an array or 'balanced', got 'rare'"),
    ],
)
def test_other_weights_are_refused(weights, reason):
    with pytest.raises(ValueError, match=f"^WeightedDataset: .*{re.escape(reason)}"):
        WeightedDataset(IMAGES, weights)


@each(
    "data",
    [
        TokenDataset(np.arange(40) % 5, 7),
        ArrayDataset(np.zeros((4, 2, 2, 1)), np.zeros((4, 2, 2), int)),
    ],
)
def test_only_classes_of_samples_can_be_balanced(data):
    with pytest.raises(ValueError, match="require one class for each sample, got targets of shape"):
        WeightedDataset(data)
    with pytest.raises(ValueError, match="one class per sample, got"):
        balanced_weights(ArrayDataset(np.zeros((4, 1)), np.zeros((4, 2))))
    assert len(WeightedDataset(data, np.ones(len(data)))) == len(data)
