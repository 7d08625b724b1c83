"""Mixup and CutMix: the mixtures, their labels, and their independence of ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import (
    ArrayDataset,
    Batch,
    CutMix,
    HorizontalFlip,
    Loader,
    Mixup,
    RandAugment,
    RandomCrop,
)
from pydtnn.data.mixing import mix_samples
from pydtnn.layers import Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.training.trainer import Trainer
from tests.each import each

MIXES: dict[str, tuple[Any, ...]] = {
    "mixup": (Mixup(0.7),),
    "cutmix": (CutMix(),),
    "both": (Mixup(0.7), CutMix()),
}


def words_of(rng: np.random.Generator, n: int) -> NDArray[np.uint32]:
    return rng.integers(0, 2**32, (n, 4), dtype=np.uint32)


def batches(data: ArrayDataset, rank: int = 0, size: int = 1, **options: Any) -> list[Batch]:
    options = {"global_batch_size": 8, "seed": 5, **options}
    with Loader(data, rank=rank, size=size, **options) as loader:
        return list(loader.epoch(2))


@each("dtype", ["float32", "float64", "float16"])
def test_mixup_averages_pairs_with_weights_of_a_beta_distribution(rng, dtype):
    n = 5000
    x, other = (rng.normal(size=(n, 3, 2)).astype(dtype) for _ in range(2))
    mixed, share = Mixup(0.4)(x, other, words_of(rng, n))
    assert mixed.dtype == dtype
    weight = share[:, None, None]
    expected = weight * x.astype(float) + (1 - weight) * other.astype(float)
    # Weights and products are rounded to at least float32, the result to its type.
    tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(mixed, expected, rtol=tolerance, atol=tolerance)
    assert abs(share.mean() - 0.5) < 0.03  # deviation 0.005
    assert abs(share.var() - 1 / (4 * 1.8)) < 0.01  # the variance of Beta(0.4, 0.4)


def test_cutmix_replaces_one_box_and_its_area_is_the_share_of_the_label(rng):
    n, height, width = 1000, 100, 120
    x, other = np.zeros((n, height, width, 1)), np.ones((n, height, width, 1))
    mixed, share = CutMix()(x, other, words_of(rng, n))
    inside = mixed[..., 0] == 1
    np.testing.assert_allclose(inside.mean(axis=(1, 2)), 1 - share, atol=1e-12)
    rows, columns = inside.any(axis=2).sum(axis=1), inside.any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(rows * columns, inside.sum(axis=(1, 2)))  # one rectangle
    assert not x.any()
    assert share.min() < 0.3
    assert share.max() > 0.95
    # Boxes at the border are cut off: of a side s, 3/4 of the area (1 - s/4)^2 remain on average.
    side = np.sqrt((np.arange(1000) + 0.5) / 1000)
    expected = 1 - np.mean((side * (1 - side / 4)) ** 2)
    assert abs(share.mean() - expected) < 0.03  # whole pixels, and deviation 0.01
    assert inside.mean(axis=0).min() > 0.08  # everywhere; 1/8 in a corner


def test_labels_are_the_shares_of_both_samples(rng):
    x, labels = np.arange(5.0)[:, None], np.array([2, 0, 0, 1, 2])
    words = words_of(rng, 4)
    mixed, y = mix_samples([Mixup(1.0)], x, labels, words, 3)
    share = Mixup(1.0).weights(words)
    expected = np.zeros((4, 3))
    for i in range(4):
        expected[i, labels[i + 1]] += share[i]
        expected[i, labels[i]] += 1 - share[i]
    np.testing.assert_allclose(y, expected, rtol=1e-15)
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-15)
    np.testing.assert_allclose(mixed[:, 0], np.arange(1, 5) - (1 - share), rtol=1e-14)
    # of several mixings each is used for about as many samples
    x = np.arange(2001.0)[:, None, None, None] % 2 + np.zeros((1, 4, 4, 1))
    mixed, _ = mix_samples([Mixup(1.0), CutMix()], x, np.zeros(2001, int), words_of(rng, 2000), 2)
    averaged = ((mixed > 0) & (mixed < 1)).any(axis=(1, 2, 3)).mean()
    assert abs(averaged - 0.5) < 0.06  # deviation 0.011


@each("mix", ["mixup", "cutmix"])
def test_each_sample_is_mixed_with_the_one_before_it_in_the_global_batch(images, mix):
    augment = (HorizontalFlip(),)
    plain, mixed = (batches(images, augment=augment, mix=chosen) for chosen in ((), MIXES[mix]))
    for one, other in zip(plain, mixed, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)
        assert other.y.dtype == np.float32
        x, labels = np.roll(one.x, 1, axis=0), np.roll(one.y, 1)
        n = np.arange(len(one))
        differ = one.y != labels
        np.testing.assert_allclose(other.y.sum(axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(other.y[n, one.y] + differ * other.y[n, labels], 1, atol=1e-6)
        share = other.y[n, one.y][differ]
        if mix == "mixup":
            weight = share[:, None, None, None]
            expected = weight * one.x[differ] + (1 - weight) * x[differ]
            np.testing.assert_allclose(other.x[differ], expected, atol=1e-5)  # float32
        else:
            own = (other.x == one.x).all(axis=-1)
            assert (own | (other.x == x).all(axis=-1)).all()
            np.testing.assert_allclose(own.mean(axis=(1, 2))[differ], share, atol=1e-6)
        assert len(share) > 0


@each("mix", MIXES)
@each("size", [3, 8])
def test_mixtures_do_not_depend_on_the_number_of_ranks_or_threads(images, mix, size):
    options = {"mix": MIXES[mix], "augment": (RandomCrop(2), RandAugment())}
    alone = batches(images, **options)
    ranks = [batches(images, rank, size, prefetch=3, threads=3, **options) for rank in range(size)]
    for step, whole in enumerate(alone):
        for name in ("samples", "x", "y"):
            parts = [getattr(rank[step], name) for rank in ranks]
            assert np.concatenate(parts).tobytes() == getattr(whole, name).tobytes()


def test_an_empty_part_of_a_batch_has_no_mixtures(images):
    data = images.subset(np.arange(9))
    last = [batches(data, rank, 4, mix=MIXES["both"], shuffle=False)[1] for rank in range(4)]
    assert [len(batch) for batch in last] == [1, 0, 0, 0]
    assert [batch.x.shape for batch in last] == [(n, 6, 5, 3) for n in (1, 0, 0, 0)]
    assert [batch.y.shape for batch in last] == [(n, 4) for n in (1, 0, 0, 0)]
    np.testing.assert_allclose(last[0].y, np.eye(4)[images.y[8:9]], atol=1e-7)  # with itself


def test_mixed_samples_are_prepared_on_the_host(images):
    loader = Loader(images, global_batch_size=8, raw=True, mix=[Mixup()])
    assert loader.why_not_raw == "samples are mixed"
    plain = batches(images, mix=[Mixup()])
    for one, other in zip(plain, batches(images, mix=[Mixup()], raw=True), strict=True):
        assert one.x.tobytes() == other.x.tobytes()


class Wrong(ArrayDataset):
    """Vectors whose labels become others when they are read."""

    def read(self, indices: NDArray[Any]) -> tuple[Any, Any]:
        return super().read(indices)[0], self.labels[indices % 2]


def wrong(labels: list[Any]) -> Wrong:
    data = Wrong(np.zeros((9, 2)), np.arange(9) % 3)
    data.labels = np.array(labels)
    return data


VECTORS = ArrayDataset(np.zeros((9, 2)), np.arange(9) % 3)


@each(
    ("call", "reason"),
    [
        (lambda: Mixup(0), "Mixup: alpha must be above 0, got 0"),
        (lambda: CutMix(float("nan")), "CutMix: alpha must be above 0, got nan"),
        (lambda: batches(VECTORS, mix=Mixup()), "mix must be a list of mixings, such as [Mixup"),
        (lambda: batches(VECTORS, mix=[CutMix()]), "CutMix: samples must be images"),
        (
            lambda: batches(ArrayDataset(VECTORS.x, np.zeros(9)), mix=[Mixup()]),
            "Loader: mixing requires samples of one input with classes, got None classes",
        ),
        (lambda: batches(wrong([0, 3]), mix=[Mixup()]), "classes must be in 0..2"),
        (lambda: batches(wrong([0.0, 1.0]), mix=[Mixup()]), "mixing requires one"),
    ],
)
def test_what_cannot_be_mixed_is_refused(call, reason):
    with pytest.raises((TypeError, ValueError), match=re.escape(reason)):
        call()
    assert batches(VECTORS, mix=[Mixup()])[0].y.shape == (8, 3)  # vectors can be averaged


@each("loss", ["cross_entropy", "binary_cross_entropy", "mse"])
def test_a_model_learns_from_mixed_samples(rng, loss):
    y = np.arange(120) % 3
    x = rng.normal(size=(120, 4, 4, 1)) + 2 * np.eye(16)[y].reshape(-1, 4, 4, 1)
    data = ArrayDataset(x, y)
    model = Model(Sequential(Flatten(), Linear(16), ReLU(), Linear(3)), (4, 4, 1), backend="cpu")
    metrics = ["accuracy", "top2_accuracy", "regression_mse", "categorical_hinge"]
    trainer = Trainer(model, SGD(0.05, momentum=0.9), loss=loss, metrics=metrics, progress=False)
    history = trainer.fit(data, data, epochs=15, batch_size=20, mix=[Mixup(0.3), CutMix(0.3)])
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert history[-1]["val_accuracy"] > 0.8
