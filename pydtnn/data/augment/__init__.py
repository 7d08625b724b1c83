"""Random augmentation of batches of training images, keyed by (seed, epoch, sample)."""

from pydtnn.data.augment.augmentation import WORDS, Augmentation
from pydtnn.data.augment.autoaugment import AutoAugment
from pydtnn.data.augment.erasing import RandomErasing
from pydtnn.data.augment.jitter import ColorJitter
from pydtnn.data.augment.named import AUGMENTATION, AUGMENTATIONS, create_augmentations
from pydtnn.data.augment.pixels import PixelAugmentation
from pydtnn.data.augment.randaugment import RandAugment
from pydtnn.data.augment.resized_crop import RandomResizedCrop
from pydtnn.data.augment.simple import Cutout, HorizontalFlip, RandomCrop

__all__ = [
    "AUGMENTATION",
    "AUGMENTATIONS",
    "WORDS",
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
