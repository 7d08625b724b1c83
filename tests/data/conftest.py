"""Where tests find real data, and the small data sets that they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pydtnn.data import ArrayDataset


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """A function that gives a folder of $PYDTNN_DATA, or skips the test without it."""

    def folder(name: str) -> Path:
        path = Path(os.environ.get("PYDTNN_DATA", "")) / name
        if "PYDTNN_DATA" not in os.environ or not path.is_dir():
            pytest.skip(f"needs {name} in the folder that PYDTNN_DATA names")
        return path

    return folder


@pytest.fixture
def images(rng: np.random.Generator) -> ArrayDataset:
    """23 random images of 6 x 5 pixels and 3 channels; the first pixel of each is its index."""
    x = rng.integers(0, 256, (23, 6, 5, 3)).astype(np.uint8)
    x[:, 0, 0, 0] = np.arange(23)
    return ArrayDataset(x, np.arange(23) % 4, name="images")
