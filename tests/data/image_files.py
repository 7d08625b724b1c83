"""Small image files in folders, and what they contain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import Dataset

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: the extra `data`")

CLASSES = ("ant", "bee", "cat")
COUNTS = {"train": (5, 7, 4), "val": (2, 3, 1)}
"""Images of each class."""


def write_image(path: Path, pixels: NDArray[np.uint8], **options: Any) -> None:
    """Write pixels (H, W) or (H, W, C) to a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels).save(path, **options)


def write_images(
    root: Path, suffix: str = "png", shape: Sequence[int] = (6, 5, 3), seed: int = 0
) -> Path:
    """Write random images of three classes, to train and to validate with."""
    rng = np.random.default_rng(seed)
    for part, counts in COUNTS.items():
        for name, count in zip(CLASSES, counts, strict=True):
            for i in range(count):
                pixels = rng.integers(0, 256, shape).astype(np.uint8)
                write_image(root / part / name / f"{i}.{suffix}", pixels)
    return root


def read_all(data: Dataset) -> tuple[Any, Any]:
    """All samples and targets of a data set."""
    return data.read(np.arange(len(data)))


def pixels_of(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and classes in the order of their paths, decoded here."""
    paths = sorted(folder.glob("*/*"))
    names = sorted({path.parent.name for path in paths})
    pixels = np.stack([np.asarray(image.open(path).convert("RGB")) for path in paths])
    return pixels, np.array([names.index(path.parent.name) for path in paths])
