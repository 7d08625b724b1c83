"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels inside a package."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pydtnn.data.array import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.data.synthetic import TRAIN_DIGITS
from pydtnn.utils.imports import import_optional

NAMES = tuple("0123456789")


def load_digits() -> tuple[Dataset, Dataset]:
    """Read the digits, with their 17 grey levels spread over 0..255.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    """
    images, labels = _read()
    x = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    train = ArrayDataset(x[:TRAIN_DIGITS], labels[:TRAIN_DIGITS], class_names=NAMES, name="digits")
    return train, ArrayDataset(x[TRAIN_DIGITS:], labels[TRAIN_DIGITS:], name="digits", like=train)


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Read the file of scikit-learn's package: importing the package takes seconds."""
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            with gzip.open(path, "rt") as file:
                table = np.loadtxt(file, dtype=np.int64, delimiter=",")
            return table[:, :-1], table[:, -1]
    datasets = import_optional("sklearn.datasets", "scikit-learn", "digits")
    images, labels = datasets.load_digits(return_X_y=True)
    return images, labels
