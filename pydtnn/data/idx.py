"""The idx file format of MNIST: a magic number, the dimensions, the bytes.

LeCun, Cortes and Burges, "The MNIST database of handwritten digits" (1998).
"""

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

from pydtnn.utils.files import check_expansion, open_file

UBYTE = 0x08
"""Element type in the third byte of the magic number; the fourth counts the dimensions."""


def read_idx(path: Path, dimensions: int) -> NDArray[Any]:
    """Read an idx file of unsigned bytes.

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
