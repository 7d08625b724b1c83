from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pydtnn.data import (
    ArrayDataset,
    Dataset,
    Synthetic,
    TokenDataset,
    load_folder,
    split_validation,
)
from tests.data.image_files import write_images


def test_a_subset_reads_the_chosen_samples_in_the_order_given(images):
    part = images.subset([5, 3, 3]).subset([2, 0])
    x, y = part.read(np.array([1, 0]))
    np.testing.assert_array_equal(x, images.x[[5, 3]])
    np.testing.assert_array_equal(y, images.y[[5, 3]])
    assert len(part) == 2
    assert (part.name, part.input_shape, part.classes) == ("images", (6, 5, 3), 4)


def data_of_every_kind(images: ArrayDataset, folder: Path) -> list[Dataset]:
    """Data sets with 16 samples at least, of each class that reads by index."""
    made = [images, images.subset(range(20)), Synthetic(30, shape=(8, 8, 3))]
    return [*made, TokenDataset(np.arange(200), 4), load_folder(data_dir=write_images(folder))[0]]


def test_a_mask_selects_samples_wherever_indices_are_taken(images, rng, tmp_path):
    for data in data_of_every_kind(images, tmp_path):
        mask = rng.random(len(data)) < 0.4
        expected = data.read(np.flatnonzero(mask))
        for found in (data.subset(mask).read(np.arange(mask.sum())), data.read(mask)):
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(data.read_targets(mask), expected[1])
        assert len(data.subset(mask.tolist())) == mask.sum()
        assert len(data.subset([])) == 0


WHOLE = "whole numbers, or a mask of .* booleans, got"


def test_other_indices_are_refused(images, tmp_path):
    every = data_of_every_kind(images, tmp_path)
    for indices, reason in (
        ([0.0, 1.0], f"{WHOLE} float64"),
        (["0"], "whole numbers, or a mask"),
        ([True, False], f"{WHOLE} bool of shape"),
        ([[True], [False]], f"{WHOLE} bool of shape"),
        (np.ma.masked_less([1, 0, 3], 1), "without a mask, got one of np.ma"),
        ([[0], [0, 1]], "samples of one shape"),
    ):
        for data in every:
            with pytest.raises((TypeError, ValueError), match=reason):
                data.subset(indices)
            if not isinstance(data, ArrayDataset):  # NumPy refuses them, in words of its own
                with pytest.raises((TypeError, ValueError), match=reason):
                    data.read(indices)
    for outside in ([23], [-1], [[0, 1]]):
        with pytest.raises((TypeError, ValueError), match="Subset: indices must"):
            images.subset(outside)


def test_a_validation_split_uses_each_sample_once_and_depends_on_the_seed(images):
    train, validation = split_validation(images, 0.2, seed=1)
    assert (len(train), len(validation)) == (18, 5)
    np.testing.assert_array_equal(
        np.sort(np.concatenate([train.indices, validation.indices])), np.arange(23)
    )
    again = split_validation(images, 0.2, seed=1)[1]
    np.testing.assert_array_equal(again.indices, validation.indices)
    assert (split_validation(images, 0.2, seed=2)[1].indices != validation.indices).any()


def test_both_parts_of_a_split_have_a_sample(images):
    for fraction, held in ((1e-9, 1), (1 - 1e-9, 22)):
        assert len(split_validation(images, fraction)[1]) == held
    for wrong in (0, 1, -0.1, 2, float("nan")):
        with pytest.raises(ValueError, match="fraction must be above 0 and below 1"):
            split_validation(images, wrong)
    with pytest.raises(ValueError, match="expected at least 2 samples, got 1"):
        split_validation(images.subset([0]), 0.5)
