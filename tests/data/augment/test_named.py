"""Augmentations by name, and what holds for all of them."""

import re

import numpy as np
import pytest

from pydtnn.data import (
    AUGMENTATIONS,
    AlternatingFlip,
    ArrayDataset,
    ColorJitter,
    Cutout,
    HorizontalFlip,
    Loader,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    create_augmentations,
)
from tests.each import each

ALL = [
    *(RandomCrop(2), RandomResizedCrop(), HorizontalFlip(), AlternatingFlip(), ColorJitter()),
    *(RandAugment(), RandAugment(5, 30), Cutout(4), Cutout(3), RandomErasing(0.8)),
]


@each("change", ALL)
@each("shape", [(8, 8, 3), (9, 7, 1), (1, 2, 3)])
@each("dtype", ["uint8", "float32"])
def test_a_sample_s_change_does_not_depend_on_the_rest_of_the_batch(rng, change, shape, dtype):
    x = rng.integers(0, 256, (21, *shape))
    x = x.astype(np.uint8) if dtype == "uint8" else (x / 255).astype(dtype)
    assert {type(change) for change in ALL} == {*AUGMENTATIONS.values()}
    assert change.words % 4 == 0
    words = rng.integers(0, 2**32, (21, change.words), dtype=np.uint32)
    fill = np.zeros(shape[-1], dtype)
    together = change(x.copy(), words, fill)
    assert (together.shape, together.dtype) == (x.shape, x.dtype)
    assert together.flags.c_contiguous
    for rows in ([3], [9, 0, 4], [*range(20)], []):
        alone = change(x[rows], words[rows], fill)
        np.testing.assert_array_equal(alone, together[rows])


def test_augmentations_are_made_from_one_line():
    usual = (RandomCrop(2), HorizontalFlip(), Cutout(8))
    assert create_augmentations("crop:2, flip,cutout") == usual
    numbers = (RandomResizedCrop(0.3), ColorJitter(0.2, 0.1, 0), RandAugment(1, 14))
    text = "resized_crop:0.3,jitter:.2:0.1:0,randaugment:1:14"
    assert create_augmentations(text) == numbers
    assert create_augmentations("none") == create_augmentations("") == ()


@each(
    ("text", "reason"),
    [
        ("crap:4", "unknown augmentation 'crap'; did you mean 'crop'"),
        ("crop:x", "augmentation: expected a name and numbers, as in crop:PADDING, got 'crop:x'"),
        ("crop:1.5", "expected a name and numbers, as in crop:PADDING, got 'crop:1.5'"),
        ("flip:2", "augmentation: expected a name and numbers, as in flip, got 'flip:2'"),
        ("jitter:1:1:1:0:1", "as in jitter:BRIGHTNESS:CONTRAST:SATURATION:HUE, got"),
        ("crop:0", "padding must be at least 1, got 0"),
        ("randaugment:0", "RandAugment: operations must be at least 1, got 0"),
        ("randaugment:2:31", "magnitude must be at least 0 and at most 30, got 31"),
        ("resized_crop:0", "RandomResizedCrop: smallest must be above 0 and at most 1"),
        ("resized_crop:0.5:0.4", "largest must be at least 0.5 and at most 1, got"),
        ("resized_crop:0.1:1:0.5", "RandomResizedCrop: ratio must be at least 1"),
        ("erasing:1.5", "RandomErasing: probability must be at least 0 and at most 1"),
        ("erasing:0.5:0.5", "RandomErasing: largest must be at least 0.5"),
        ("jitter:0:0:0:0.6", "ColorJitter: hue must be at least 0 and at most 0.5, got 0.6"),
    ],
)
def test_a_line_that_means_nothing_is_refused(text, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        create_augmentations(text)


@each("name", ["jitter", "randaugment"])
def test_colours_are_changed_of_pixels_only(rng, name):
    augment = create_augmentations(name)
    floats = ArrayDataset(rng.normal(size=(4, 6, 6, 3)), [0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"requires pixels, uint8 or in \[0, 1\], .* in array;"):
        Loader(floats, global_batch_size=2, augment=augment)
    four = ArrayDataset(rng.integers(0, 256, (4, 6, 6, 4)).astype(np.uint8), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="images must have 1 or 3 channels, .* got 4"):
        Loader(four, global_batch_size=2, augment=augment)
