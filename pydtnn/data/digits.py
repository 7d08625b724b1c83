"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels inside a package."""

from __future__ import annotations

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
    datasets = import_optional("sklearn.datasets", "scikit-learn", "digits")
    images, labels = datasets.load_digits(return_X_y=True)
    x = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    train = ArrayDataset(x[:TRAIN_DIGITS], labels[:TRAIN_DIGITS], class_names=NAMES, name="digits")
    return train, ArrayDataset(x[TRAIN_DIGITS:], labels[TRAIN_DIGITS:], name="digits", like=train)
