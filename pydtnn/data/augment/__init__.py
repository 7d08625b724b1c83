"""Random augmentation of batches of training images, keyed by (seed, epoch, sample)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import homes, lazy

if TYPE_CHECKING:
    from pydtnn.data.augment.augmentation import WORDS_PER_SAMPLE as WORDS_PER_SAMPLE
    from pydtnn.data.augment.augmentation import Augmentation as Augmentation
    from pydtnn.data.augment.jitter import ColorJitter as ColorJitter
    from pydtnn.data.augment.named import AUGMENTATION as AUGMENTATION
    from pydtnn.data.augment.named import AUGMENTATIONS as AUGMENTATIONS
    from pydtnn.data.augment.named import create_augmentations as create_augmentations
    from pydtnn.data.augment.operations import PixelAugmentation as PixelAugmentation
    from pydtnn.data.augment.randaugment import RandAugment as RandAugment
    from pydtnn.data.augment.resized_crop import RandomResizedCrop as RandomResizedCrop
    from pydtnn.data.augment.simple import AlternatingFlip as AlternatingFlip
    from pydtnn.data.augment.simple import Cutout as Cutout
    from pydtnn.data.augment.simple import HorizontalFlip as HorizontalFlip
    from pydtnn.data.augment.simple import RandomCrop as RandomCrop
    from pydtnn.data.augment.simple import RandomErasing as RandomErasing

__all__ = sorted(homes(__name__))

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
