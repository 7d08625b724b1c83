"""Codes of any number of bits, packed in bytes without gaps.

Eight codes of `width` bits occupy `width` bytes. Codes are therefore processed in rows of eight,
and each column of bytes is computed from the few columns of codes that overlap it.
"""

from __future__ import annotations

import numpy as np


def pack_bits(codes: np.ndarray, width: int) -> np.ndarray:
    """Pack codes, the most significant bit first; those of 8, 16 or 32 bits are unchanged.

    Parameters
    ----------
    codes : ndarray (n,) of unsigned integers below ``2**width``
    width : int
        Bits per code, 1 to 32.

    Returns
    -------
    ndarray (ceil(n width / 8),) of uint8

    Examples
    --------
    >>> [f"{byte:08b}" for byte in pack_bits(np.array([0b101, 0b110, 0b001], "uint8"), 3)]
    ['10111000', '10000000']
    """
    if width in (8, 16, 32):
        return codes.astype(code_type(width), copy=False).view(np.uint8)
    rows = np.zeros((-(-codes.size // 8), 8), codes.dtype)
    rows.reshape(-1)[: codes.size] = codes
    packed = np.zeros((len(rows), width), np.uint8)
    for byte, column, left in _overlaps(width):
        shifted = rows[:, column] << left if left >= 0 else rows[:, column] >> -left
        packed[:, byte] |= shifted.astype(np.uint8)  # keeps the lowest 8 bits
    return packed.reshape(-1)[: -(-codes.size * width // 8)]


def unpack_bits(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Return the `count` packed codes in the smallest sufficient unsigned integer type."""
    dtype = code_type(width)
    if width in (8, 16, 32):
        return packed.view(dtype)
    bytes_ = np.zeros((-(-count // 8), width), np.uint8)
    bytes_.reshape(-1)[: packed.size] = packed
    rows = np.zeros((len(bytes_), 8), dtype)
    for byte, column, left in _overlaps(width):
        whole = bytes_[:, byte].astype(dtype)
        rows[:, column] |= whole >> left if left >= 0 else whole << -left
    rows &= dtype.type(2**width - 1)
    return rows.reshape(-1)[:count]


def code_type(width: int) -> np.dtype:
    """Return the smallest unsigned integer type of at least `width` bits."""
    return np.dtype("uint8" if width <= 8 else "uint16" if width <= 16 else "uint32")


def _overlaps(width: int) -> list[tuple[int, int, int]]:
    """Return the pairs of byte and code of a row that share bits, and the shift to the left.

    Code `column` is bits ``[width column, width (column + 1))`` of the row, byte `byte` is bits
    ``[8 byte, 8 byte + 8)``; a left shift by the difference of their ends aligns the two.
    """
    return [
        (byte, column, 8 * (byte + 1) - width * (column + 1))
        for byte in range(width)
        for column in range(8 * byte // width, min(-(-8 * (byte + 1) // width), 8))
    ]
