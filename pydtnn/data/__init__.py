"""Data sets, augmentation and the loader of each rank's shard.

>>> train, test = load_dataset("synthetic", samples=64)
>>> loader = Loader(train, global_batch_size=32, augment=create_augmentations("crop:4,flip"))
>>> [batch.x.shape for batch in loader.epoch(0)]
[(32, 32, 32, 3), (32, 32, 32, 3)]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from pydtnn.data.balance import balanced_weights
from pydtnn.data.batch import Batch
from pydtnn.data.cifar import load_cifar10, load_cifar100
from pydtnn.data.dataset import Dataset, Subset, split_validation
from pydtnn.data.digits import load_digits
from pydtnn.data.folder import load_folder
from pydtnn.data.loader import Loader
from pydtnn.data.locate import data_folder
from pydtnn.data.mixing import CutMix, Mixing, Mixup
from pydtnn.data.mnist import load_mnist
from pydtnn.data.packing import pack_shards, verify_shards
from pydtnn.data.prepare import Prepare
from pydtnn.data.shards import load_shards
from pydtnn.data.synthetic import Synthetic, load_synthetic
from pydtnn.data.text import TokenDataset, load_text
from pydtnn.utils.foreign_names import suggesting_getattr
from pydtnn.utils.registry import Found, Kind

DATASETS: dict[str, Callable[..., tuple[Dataset, Dataset]]] = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "digits": load_digits,
    "folder": load_folder,
    "mnist": load_mnist,
    "shards": load_shards,
    "synthetic": load_synthetic,
    "text": load_text,
}
"""Data sets by name: functions of keyword arguments that return training and test set."""

DATASET: Kind[tuple[Dataset, Dataset]] = Kind(
    "data set", DATASETS, tuple, "a pair of data sets, to train with and to test with"
)


def load_dataset(
    name: str | Callable[..., tuple[Dataset, Dataset]] | Found[tuple[Dataset, Dataset]],
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[Dataset, Dataset]:
    """Load a data set by name.

    Parameters
    ----------
    name : str or callable
        One of `DATASETS`, a function with the same interface, or ``path/to/file.py:function``.
    data_dir : path, optional
        Folder of the files; by default $PYDTNN_DATA, otherwise pydtnn's folder in the user's cache.
    download : bool, default False
        Whether to download missing files. If several ranks share a disk, call it on one of them
        first.
    seed : int, default 0
        Seed of computed data.
    **options
        Arguments of the data set's function, such as ``samples`` and ``shape`` of "synthetic" or
        ``labels`` of "cifar100".

    Returns
    -------
    (Dataset, Dataset)
        The training set, and the test set, which uses the training set's statistics.

    Raises
    ------
    ValueError
        If the name or an option is unknown (the message lists similar names), or a file is invalid.
    TypeError
        If a function does not return two data sets.
    FileNotFoundError
        If the files are missing; the message explains how to get them.
    ImportError
        If the data set requires a package that is not installed.

    Examples
    --------
    >>> train, test = load_dataset("synthetic", samples=100, shape=(28, 28, 1))
    >>> len(train), train.input_shape, train.classes
    (100, (28, 28, 1), 10)
    """
    found = DATASET.find(name)  # the shared arguments are for those that have a use for them
    both = found.make(options, data_dir=data_dir, download=download, seed=seed)
    if [isinstance(part, Dataset) for part in both] != [True] * 2:
        raise TypeError(f"data set {found.name}: expected {DATASET.expected}, got {both!r}")
    return both


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
    "verify_shards",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = suggesting_getattr(__name__)
