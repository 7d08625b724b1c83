"""Data sets, augmentation and the loader of each rank's shard.

>>> from pydtnn.data import Loader, create_augmentations, load_dataset
>>> train, test = load_dataset("synthetic", samples=64)
>>> loader = Loader(train, global_batch_size=32, augment=create_augmentations("crop:4,flip"))
>>> [batch.x.shape for batch in loader.epoch(0)]
[(32, 32, 32, 3), (32, 32, 32, 3)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydtnn.utils.lazy import homes, lazy

if TYPE_CHECKING:
    from pydtnn.data.array import ArrayDataset as ArrayDataset
    from pydtnn.data.augment import AUGMENTATIONS as AUGMENTATIONS
    from pydtnn.data.augment import AlternatingFlip as AlternatingFlip
    from pydtnn.data.augment import Augmentation as Augmentation
    from pydtnn.data.augment import ColorJitter as ColorJitter
    from pydtnn.data.augment import Cutout as Cutout
    from pydtnn.data.augment import HorizontalFlip as HorizontalFlip
    from pydtnn.data.augment import PixelAugmentation as PixelAugmentation
    from pydtnn.data.augment import RandAugment as RandAugment
    from pydtnn.data.augment import RandomCrop as RandomCrop
    from pydtnn.data.augment import RandomErasing as RandomErasing
    from pydtnn.data.augment import RandomResizedCrop as RandomResizedCrop
    from pydtnn.data.augment import create_augmentations as create_augmentations
    from pydtnn.data.batch import Batch as Batch
    from pydtnn.data.cifar import load_cifar10 as load_cifar10
    from pydtnn.data.cifar import load_cifar100 as load_cifar100
    from pydtnn.data.dataset import Dataset as Dataset
    from pydtnn.data.dataset import Subset as Subset
    from pydtnn.data.dataset import split_validation as split_validation
    from pydtnn.data.digits import load_digits as load_digits
    from pydtnn.data.download import data_folder as data_folder
    from pydtnn.data.folder import load_folder as load_folder
    from pydtnn.data.loader import Loader as Loader
    from pydtnn.data.mixing import CutMix as CutMix
    from pydtnn.data.mixing import Mixing as Mixing
    from pydtnn.data.mixing import Mixup as Mixup
    from pydtnn.data.mnist import load_mnist as load_mnist
    from pydtnn.data.named import DATASETS as DATASETS
    from pydtnn.data.named import load_dataset as load_dataset
    from pydtnn.data.prepare import Prepare as Prepare
    from pydtnn.data.synthetic import Synthetic as Synthetic
    from pydtnn.data.synthetic import load_synthetic as load_synthetic
    from pydtnn.data.text import TokenDataset as TokenDataset
    from pydtnn.data.text import load_text as load_text
    from pydtnn.data.tokenizer import Tokenizer as Tokenizer
    from pydtnn.data.weighted import balanced_weights as balanced_weights

    load_shards: Any
    pack_shards: Any
    verify_shards: Any

FROM_TOOLS = dict.fromkeys(("load_shards", "pack_shards", "verify_shards"), "shards")

__all__ = sorted(homes(__name__))

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__, FROM_TOOLS)
