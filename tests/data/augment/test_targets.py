"""Targets with positions: they are moved with their images, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import (
    AUGMENTATIONS,
    AlternatingFlip,
    ArrayDataset,
    Augmentation,
    ColorJitter,
    CutMix,
    Cutout,
    HorizontalFlip,
    Loader,
    Mixup,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
)
from pydtnn.data.augment.operations import OPERATIONS
from pydtnn.data.augment.resized_crop import enlarge
from tests.each import each

Array = NDArray[Any]

MOVING = [
    *(RandomCrop(3), HorizontalFlip(), AlternatingFlip(), RandAugment(), RandAugment(5, 30)),
    RandomResizedCrop(0.2),
]
STILL = [ColorJitter(), Cutout(4), RandomErasing(1.0)]
N, H, W = 40, 9, 7


def labels(rng: np.random.Generator, *shape: int) -> NDArray[np.int64]:
    return rng.integers(0, 5, (N, *shape))


def batches(data: ArrayDataset, *augment: Augmentation, **options: Any) -> Any:
    with Loader(data, global_batch_size=16, augment=augment, seed=4, **options) as loader:
        return [batch for epoch in range(2) for batch in loader.epoch(epoch)]


@pytest.fixture
def without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change no colours, so that images that show labels remain comparable with them."""
    for name, operation in OPERATIONS.items():
        if not operation.moves:
            monkeypatch.setitem(OPERATIONS, name, operation._replace(apply=lambda x, *_: x))


@pytest.mark.usefixtures("without_colours")
@each("change", MOVING[:-1])
@each("channels", [(), (3,)])
def test_masks_move_with_their_images(rng, change, channels):
    masks = labels(rng, H, W, *channels)
    x = np.repeat(masks.reshape(N, H, W, -1)[..., :1], 3, axis=-1).astype(np.uint8)
    x[:] += 50
    data = ArrayDataset(x, masks, ignore_index=-9)
    data.statistics = None
    together = batches(data, change)
    moved = 0
    for batch in together:
        shown = batch.y.reshape(*batch.y.shape[:3], -1)[..., 0]
        inside = shown != -9
        np.testing.assert_array_equal(batch.x[..., 0][inside], shown[inside] + 50)
        assert (batch.x[..., 0][~inside] == 0).all()  # without statistics, the mean is 0
        moved += int((batch.y != masks[batch.samples]).any())
    assert moved == len(together)
    parts = [batches(data, change, rank=rank, size=3) for rank in range(3)]
    for step, batch in enumerate(together):
        np.testing.assert_array_equal(np.concatenate([own[step].y for own in parts]), batch.y)


def test_masks_of_resized_crops_have_the_nearest_pixels(rng):
    change, words = RandomResizedCrop(0.1), rng.integers(0, 2**32, (N, 24), np.uint32)
    for across in (False, True):
        stripes = labels(rng, 1, W) % 2 if across else labels(rng, H, 1) % 2
        masks = np.broadcast_to(stripes, (N, H, W))[..., None].copy()
        moved = change.on_masks(masks, words, np.zeros(1, np.int64))
        image = enlarge((255 * masks).astype(float), change._boxes(masks, words))
        clear = abs(image - 127.5) > 1  # between two pixels, both are nearest
        np.testing.assert_array_equal((image > 127.5)[clear], moved[clear])
        assert (moved != masks).any(axis=(1, 2, 3)).sum() > N // 2


def with_targets(rng: np.random.Generator, y: Array) -> ArrayDataset:
    return ArrayDataset(rng.integers(0, 256, (N, H, W, 3)).astype(np.uint8), y)


def test_targets_are_unchanged_if_they_have_no_places_or_pixels_do_not_move(rng):
    assert all(change.moves for change in MOVING)
    assert not any(change.moves for change in STILL)
    assert {*map(type, MOVING + STILL)} == {*AUGMENTATIONS.values()}
    classes = [labels(rng), labels(rng, 6) < 2, (labels(rng, 6) < 2).astype("float32")]
    places = [labels(rng, H, W), rng.random((N, 4)), rng.random((N, 5, 2)), rng.random(N)]
    for y, changes in [(y, MOVING) for y in classes] + [(y, STILL) for y in classes + places]:
        for change in changes:
            for batch in batches(with_targets(rng, y), change):
                np.testing.assert_array_equal(batch.y, y.astype(batch.y.dtype)[batch.samples])


@each("change", MOVING)
@each(
    "make",
    [
        lambda rng: rng.random((N, 4)),
        lambda rng: rng.integers(0, 9, (N, 4)),
        lambda rng: rng.random(N),
        lambda rng: rng.integers(0, 5, (N, H, 2 * W)),
    ],
)
def test_other_targets_are_refused_unless_they_are_said_to_be_unchanged(rng, change, make):
    data = with_targets(rng, make(rng))
    reason = f"{type(change).__name__} moves the pixels of images, and cannot move the targets"
    with pytest.raises(ValueError, match=f"Loader: {reason}.*targets='unchanged'"):
        batches(data, change)
    with pytest.raises(ValueError, match="targets must be 'moved' or 'unchanged', got 'kept'"):
        batches(data, change, targets="kept")
    for batch in batches(data, change, targets="unchanged"):
        np.testing.assert_array_equal(batch.y, data.y.astype(batch.y.dtype)[batch.samples])


def test_of_several_targets_only_masks_are_moved(rng):
    masks, classes = labels(rng, H, W), labels(rng)
    x = np.repeat(masks[..., None], 3, axis=-1).astype(np.uint8)
    data = ArrayDataset(x, (classes, masks))
    for one, other in zip(
        batches(data, HorizontalFlip(), raw=True), batches(data, HorizontalFlip()), strict=True
    ):
        np.testing.assert_array_equal(one.y[0], classes[one.samples])
        np.testing.assert_array_equal(one.y[1], other.y[1])
        assert one.words is not None  # the device flips the images
        flipped = masks[one.samples, :, ::-1]
        chosen = one.words[:, :1, None] >= 2**31
        np.testing.assert_array_equal(one.y[1], np.where(chosen, flipped, masks[one.samples]))


@dataclass(frozen=True)
class Upside(Augmentation):
    """One of a user's own that says nothing of masks."""

    def __call__(self, x: Any, words: Any, fill: Any) -> Any:
        return x[:, ::-1].copy()


class BothUpside(Upside):
    def on_masks(self, masks: Any, words: Any, fill: Any) -> Any:
        return masks[:, ::-1]


def test_an_augmentation_of_one_s_own_says_how_masks_move(rng):
    masks = labels(rng, H, W)
    data = ArrayDataset(np.zeros((N, H, W, 3), np.uint8), masks)
    with pytest.raises(ValueError, match="Upside moves the pixels of images, .* the masks of"):
        batches(data, Upside())
    for batch in batches(data, BothUpside()):
        np.testing.assert_array_equal(batch.y, masks[batch.samples, ::-1])


def test_only_labels_of_samples_that_have_classes_are_mixed(rng):
    x = rng.random((N, H, W, 3)).astype(np.float32)
    for y in (labels(rng, H, W), labels(rng, 3)):
        with pytest.raises(ValueError, match=r"one integer class per sample.* in array; omit it"):
            batches(ArrayDataset(x, y, ignore_index=255), mix=[CutMix()])
    y = np.zeros(N, int)
    y[0] = -1
    with pytest.raises(ValueError, match=r"array: classes must be in 0\.\.\d, got -1"):
        batches(ArrayDataset(x, y, classes=3, ignore_index=-1), mix=[Mixup()])
