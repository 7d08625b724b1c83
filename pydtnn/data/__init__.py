"""Data sets, augmentation and the loader of each rank's shard.

>>> from pydtnn.data import Loader, create_augmentations, load_dataset
>>> train, test = load_dataset("synthetic", samples=64)
>>> loader = Loader(train, global_batch_size=32, augment=create_augmentations("crop:4,flip"))
>>> [batch.x.shape for batch in loader.epoch(0)]
[(32, 32, 32, 3), (32, 32, 32, 3)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.data import augment
from pydtnn.utils.names import module_getattr

if TYPE_CHECKING:
    from pydtnn.data.array import ArrayDataset
    from pydtnn.data.augment import (
        AUGMENTATIONS,
        Augmentation,
        AutoAugment,
        ColorJitter,
        Cutout,
        HorizontalFlip,
        PixelAugmentation,
        RandAugment,
        RandomCrop,
        RandomErasing,
        RandomResizedCrop,
        create_augmentations,
    )
    from pydtnn.data.batch import Batch
    from pydtnn.data.cifar import load_cifar10, load_cifar100
    from pydtnn.data.dataset import Dataset, Subset, split_validation
    from pydtnn.data.digits import load_digits
    from pydtnn.data.download import data_folder
    from pydtnn.data.folder import load_folder
    from pydtnn.data.loader import Loader
    from pydtnn.data.mixing import CutMix, Mixing, Mixup
    from pydtnn.data.mnist import load_mnist
    from pydtnn.data.named import DATASETS, load_dataset
    from pydtnn.data.packing import pack_shards, verify_shards
    from pydtnn.data.prepare import Prepare
    from pydtnn.data.shards import load_shards
    from pydtnn.data.synthetic import Synthetic, load_synthetic
    from pydtnn.data.text import TokenDataset, load_text
    from pydtnn.data.tokenizer import Tokenizer, train_tokenizer
    from pydtnn.data.weighted import WeightedDataset, balanced_weights

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "ArrayDataset",
    "Augmentation",
    "AutoAugment",
    "Batch",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Dataset",
    "HorizontalFlip",
    "Loader",
    "Mixing",
    "Mixup",
    "PixelAugmentation",
    "Prepare",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "Subset",
    "Synthetic",
    "TokenDataset",
    "Tokenizer",
    "WeightedDataset",
    "balanced_weights",
    "create_augmentations",
    "data_folder",
    "load_cifar10",
    "load_cifar100",
    "load_dataset",
    "load_digits",
    "load_folder",
    "load_mnist",
    "load_shards",
    "load_synthetic",
    "load_text",
    "pack_shards",
    "split_validation",
    "train_tokenizer",
    "verify_shards",
]

_HOMES = {
    "ArrayDataset": "pydtnn.data.array",
    **dict.fromkeys(augment.__all__, "pydtnn.data.augment"),
    "Batch": "pydtnn.data.batch",
    **dict.fromkeys(("load_cifar10", "load_cifar100"), "pydtnn.data.cifar"),
    **dict.fromkeys(("Dataset", "Subset", "split_validation"), "pydtnn.data.dataset"),
    "load_digits": "pydtnn.data.digits",
    "load_folder": "pydtnn.data.folder",
    "Loader": "pydtnn.data.loader",
    "data_folder": "pydtnn.data.download",
    **dict.fromkeys(("CutMix", "Mixing", "Mixup"), "pydtnn.data.mixing"),
    "load_mnist": "pydtnn.data.mnist",
    **dict.fromkeys(("DATASETS", "load_dataset"), "pydtnn.data.named"),
    **dict.fromkeys(("pack_shards", "verify_shards"), "pydtnn.data.packing"),
    "Prepare": "pydtnn.data.prepare",
    "load_shards": "pydtnn.data.shards",
    **dict.fromkeys(("Synthetic", "load_synthetic"), "pydtnn.data.synthetic"),
    **dict.fromkeys(("TokenDataset", "load_text"), "pydtnn.data.text"),
    **dict.fromkeys(("Tokenizer", "train_tokenizer"), "pydtnn.data.tokenizer"),
    **dict.fromkeys(("WeightedDataset", "balanced_weights"), "pydtnn.data.weighted"),
}
"""Module of each name."""

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__, _HOMES)
