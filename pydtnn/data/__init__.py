"""Data sets, augmentation and the loader that gives each rank its shard.

>>> train, test = load_dataset("synthetic", samples=64)
>>> loader = Loader(train, global_batch_size=32, augment=create_augmentations("crop:4,flip"))
>>> [batch.x.shape for batch in loader.epoch(0)]
[(32, 32, 32, 3), (32, 32, 32, 3)]
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from pydtnn.data.array import ArrayDataset
from pydtnn.data.augment import (
    AUGMENTATIONS,
    Augmentation,
    Cutout,
    HorizontalFlip,
    RandomCrop,
    create_augmentations,
)
from pydtnn.data.batch import Batch
from pydtnn.data.cifar import load_cifar10, load_cifar100
from pydtnn.data.dataset import Dataset, Subset, split_validation
from pydtnn.data.digits import load_digits
from pydtnn.data.loader import Loader
from pydtnn.data.locate import data_folder
from pydtnn.data.mnist import load_mnist
from pydtnn.data.prepare import Prepare
from pydtnn.data.synthetic import Synthetic, load_synthetic
from pydtnn.utils.suggest import unknown

DATASETS: dict[str, Callable[..., tuple[Dataset, Dataset]]] = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "digits": load_digits,
    "mnist": load_mnist,
    "synthetic": load_synthetic,
}
"""The data sets by name: functions of keyword arguments that return training and test set."""

SHARED = ("data_dir", "download", "seed")
"""Arguments of `load_dataset` that a data set is given only if it has a use for them."""


def load_dataset(
    name: str | Callable[..., tuple[Dataset, Dataset]],
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[Dataset, Dataset]:
    """Load a data set by name.

    Parameters
    ----------
    name : str or callable
        One of `DATASETS`, or a function like theirs.
    data_dir : path, optional
        Folder of the files; by default $PYDTNN_DATA, otherwise pydtnn's folder in the user's cache.
    download : bool, default False
        Whether to fetch files that are missing. Where several ranks share a disk, let one of them
        do it first.
    seed : int, default 0
        Of data that are computed.
    **options
        What the data set's own function takes, such as ``samples`` and ``shape`` of "synthetic" or
        ``labels`` of "cifar100".

    Returns
    -------
    (Dataset, Dataset)
        The training set, and the test set, which takes the training set's statistics.

    Raises
    ------
    ValueError
        If the name or an option is unknown (the nearest names are offered), or a file is not what
        it should be.
    TypeError
        If a function does not return two data sets.
    FileNotFoundError
        If the files are missing; the message says how to get them.
    ImportError
        If the data set needs a package that is not installed.

    Examples
    --------
    >>> train, test = load_dataset("synthetic", samples=100, shape=(28, 28, 1))
    >>> len(train), train.input_shape, train.classes
    (100, (28, 28, 1), 10)
    """
    if callable(name):
        load, name = name, getattr(name, "__name__", repr(name))
    elif name in DATASETS:
        load = DATASETS[name]
    else:
        raise ValueError(unknown("data set", name, DATASETS))
    accepted = inspect.signature(load).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for option in options:
        if option not in accepted and not takes_any:
            own = [choice for choice in accepted if choice not in SHARED]
            raise ValueError(unknown(f"option of data set {name!r}:", option, own))
    shared = {"data_dir": data_dir, "download": download, "seed": seed}
    options |= {key: value for key, value in shared.items() if key in accepted}
    try:
        inspect.signature(load).bind(**options)
    except TypeError as error:  # "missing a required argument: 'folder'"
        raise ValueError(f"data set {name!r}: {error}") from None
    both = load(**options)
    if not isinstance(both, tuple) or [isinstance(part, Dataset) for part in both] != [True] * 2:
        raise TypeError(
            f"data set {name!r}: expected a pair of data sets, to train with and to test with, not "
            f"{both!r}"
        )
    return both


__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "ArrayDataset",
    "Augmentation",
    "Batch",
    "Cutout",
    "Dataset",
    "HorizontalFlip",
    "Loader",
    "Prepare",
    "RandomCrop",
    "Subset",
    "Synthetic",
    "create_augmentations",
    "data_folder",
    "load_cifar10",
    "load_cifar100",
    "load_dataset",
    "load_digits",
    "load_mnist",
    "load_synthetic",
    "split_validation",
]
