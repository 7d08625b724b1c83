"""MNIST: 60,000 and 10,000 handwritten digits, 28 x 28 pixels, in four idx files."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.array import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.data.download import DiskLayout, SourceFile, locate
from pydtnn.utils.files import check_expansion, open_file

UBYTE = 0x08
"""Element type in the third byte of the magic number; the fourth counts the dimensions."""


def read_idx(path: Path, dimensions: int) -> NDArray[Any]:
    """Read an idx file of unsigned bytes: a magic number, the dimensions, the bytes.

    It is not mapped into memory: truncation of a mapped file would terminate the process.

    Parameters
    ----------
    path : Path
        A name that ends in ".gz" means that the file is gzipped.
    dimensions : int
        3 for images, 1 for labels.

    Returns
    -------
    ndarray of uint8, read-only

    Raises
    ------
    ValueError
        If the magic number, the number of dimensions or the length is wrong, or the gzip data are
        damaged.
    """
    zipped = path.suffix == ".gz"
    try:
        with (
            open_file("idx", path) as file,
            gzip.GzipFile(fileobj=file) if zipped else file as stream,
        ):
            shape = _header(path, stream.read(4 + 4 * dimensions), dimensions)
            expected, size = math.prod(shape), os.fstat(file.fileno()).st_size
            if zipped:
                check_expansion(f"{path}: the file", size, expected)
            # One more byte detects a file that is too long.
            body = stream.read(expected + 1 if zipped else min(expected + 1, size))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: damaged gzip file ({error}); delete it and download it again"
        ) from error
    if len(body) != expected:
        follow = "more" if len(body) > expected else str(len(body))
        raise ValueError(
            f"{path}: expected {' x '.join(map(str, shape))} bytes after the header, got {follow}; "
            "the file is truncated or damaged: delete it and download it again"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _header(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    """Return the shape in the header."""
    magic = int.from_bytes(header[:4], "big")
    if len(header) >= 4 and magic != UBYTE << 8 | dimensions:
        raise ValueError(
            f"{path}: expected an idx file of {dimensions} dimension{'s' * (dimensions > 1)}, "
            f"which begins with 0x{UBYTE << 8 | dimensions:08x}, got 0x{magic:08x}; check that "
            "images and labels were not exchanged, or download the file again"
        )
    if len(header) < 4 + 4 * dimensions:
        raise ValueError(
            f"{path}: expected the header of an idx file, got {len(header)} bytes; the file is "
            "truncated: delete it and download it again"
        )
    return struct.unpack(f">{dimensions}I", header[4:])


IMAGE_SIDE = 28
NAMES = tuple("0123456789")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
LAYOUTS = (DiskLayout(("mnist", "MNIST/raw", "MNIST", "."), FILES),)
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
CHECKSUMS = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
SOURCES = tuple(
    SourceFile(f"{MIRROR}/{f}.gz", c, "mnist") for f, c in zip(FILES, CHECKSUMS, strict=True)
)


def load_mnist(
    *, data_dir: str | os.PathLike[str] | None = None, download: bool = False
) -> tuple[Dataset, Dataset]:
    """Read MNIST, gzipped or not, from `data_dir` or its folder ``mnist`` or ``MNIST/raw``.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is truncated, has another format, or labels do not match the images.
    """
    _, paths = locate("mnist", LAYOUTS, data_dir, SOURCES if download else ())
    parts: list[Dataset] = []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != (IMAGE_SIDE, IMAGE_SIDE) or not len(images):
            raise ValueError(
                f"mnist: {images_path} must contain images of {IMAGE_SIDE} x {IMAGE_SIDE} "
                f"pixels, got {' x '.join(map(str, images.shape))} in its header; download the "
                "file again"
            )
        if len(images) != len(labels):
            raise ValueError(
                f"mnist: expected one label per image, got {len(images)} images in {images_path} "
                f"and {len(labels)} labels in {labels_path}; download both files again"
            )
        if labels.max() > 9:
            raise ValueError(
                f"mnist: labels in {labels_path} must be in 0..9, got {labels.max()}; download the "
                "file again"
            )
        like = parts[0] if parts else None
        x = images[..., None]
        parts.append(ArrayDataset(x, labels, class_names=NAMES, name="mnist", like=like))
    return parts[0], parts[1]
