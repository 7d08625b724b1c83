"""Random augmentation of batches of training images, keyed by (seed, epoch, sample)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.utils.names import module_getattr

if TYPE_CHECKING:
    from pydtnn.data.augment.augmentation import WORDS_PER_SAMPLE as WORDS_PER_SAMPLE
    from pydtnn.data.augment.augmentation import Augmentation as Augmentation
    from pydtnn.data.augment.jitter import ColorJitter as ColorJitter
    from pydtnn.data.augment.named import AUGMENTATION as AUGMENTATION
    from pydtnn.data.augment.named import AUGMENTATIONS as AUGMENTATIONS
    from pydtnn.data.augment.named import create_augmentations as create_augmentations
    from pydtnn.data.augment.operations import PixelAugmentation as PixelAugmentation
    from pydtnn.data.augment.randaugment import AutoAugment as AutoAugment
    from pydtnn.data.augment.randaugment import RandAugment as RandAugment
    from pydtnn.data.augment.resized_crop import RandomResizedCrop as RandomResizedCrop
    from pydtnn.data.augment.simple import Cutout as Cutout
    from pydtnn.data.augment.simple import HorizontalFlip as HorizontalFlip
    from pydtnn.data.augment.simple import RandomCrop as RandomCrop
    from pydtnn.data.augment.simple import RandomErasing as RandomErasing

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

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__, _HOMES)
