"""Data sets by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pydtnn.data.dataset import Dataset
from pydtnn.utils.lazy import Named
from pydtnn.utils.registry import Factory, Registry

DATASETS = Named(
    "pydtnn.data",
    {
        "cifar10": "load_cifar10",
        "cifar100": "load_cifar100",
        "digits": "load_digits",
        "folder": "load_folder",
        "mnist": "load_mnist",
        "shards": "load_shards",
        "synthetic": "load_synthetic",
        "text": "load_text",
    },
)
"""Data sets by name: functions of keyword arguments that return training and test set."""

DATASET: Registry[tuple[Dataset, Dataset]] = Registry(
    "data set",
    DATASETS,
    tuple,
    "a pair of data sets, to train with and to test with",
    tool="sequences",
)


def load_dataset(
    name: str | Callable[..., tuple[Dataset, Dataset]] | Factory[tuple[Dataset, Dataset]],
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
