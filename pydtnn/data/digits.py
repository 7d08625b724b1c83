"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels inside a package."""

from __future__ import annotations

import numpy as np

from pydtnn.data.array import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.utils.optional import import_optional

NAMES = tuple("0123456789")

TRAIN = 1437
"""The first four fifths train: the cut of ``train_test_split(test_size=0.2, shuffle=False)``."""


def load_digits() -> tuple[Dataset, Dataset]:
    """Read the digits, with their 17 grey levels spread over 0..255.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    """
    datasets = import_optional("sklearn.datasets", "scikit-learn", "digits")
    images, labels = datasets.load_digits(return_X_y=True)
    x = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    train = ArrayDataset(x[:TRAIN], labels[:TRAIN], class_names=NAMES, name="digits")
    return train, ArrayDataset(x[TRAIN:], labels[TRAIN:], name="digits", like=train)
