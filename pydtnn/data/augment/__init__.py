"""Random augmentation of batches of training images, keyed by (seed, epoch, sample)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.utils.names import module_getattr

if TYPE_CHECKING:
    from pydtnn.data.augment.augmentation import WORDS_PER_SAMPLE, Augmentation
    from pydtnn.data.augment.jitter import ColorJitter
    from pydtnn.data.augment.named import AUGMENTATION, AUGMENTATIONS, create_augmentations
    from pydtnn.data.augment.operations import PixelAugmentation
    from pydtnn.data.augment.randaugment import AutoAugment, RandAugment
    from pydtnn.data.augment.resized_crop import RandomResizedCrop
    from pydtnn.data.augment.simple import Cutout, HorizontalFlip, RandomCrop, RandomErasing

__all__ = [
    "AUGMENTATION",
    "AUGMENTATIONS",
    "WORDS_PER_SAMPLE",
    "Augmentation",
    "AutoAugment",
    "ColorJitter",
    "Cutout",
    "HorizontalFlip",
    "PixelAugmentation",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "create_augmentations",
]

_HOMES = {
    **dict.fromkeys(("WORDS_PER_SAMPLE", "Augmentation"), "pydtnn.data.augment.augmentation"),
    "AutoAugment": "pydtnn.data.augment.randaugment",
    "RandomErasing": "pydtnn.data.augment.simple",
    "ColorJitter": "pydtnn.data.augment.jitter",
    **dict.fromkeys(
        ("AUGMENTATION", "AUGMENTATIONS", "create_augmentations"), "pydtnn.data.augment.named"
    ),
    "PixelAugmentation": "pydtnn.data.augment.operations",
    "RandAugment": "pydtnn.data.augment.randaugment",
    "RandomResizedCrop": "pydtnn.data.augment.resized_crop",
    **dict.fromkeys(("Cutout", "HorizontalFlip", "RandomCrop"), "pydtnn.data.augment.simple"),
}
"""Module of each name."""

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__, _HOMES)
