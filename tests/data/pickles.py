"""Pickles as the CIFAR files have them: written by Python 2, which this writes by hand."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray


def string(value: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(value)) + value


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def array(values: NDArray[np.uint8], length: int | None = None, code: bytes = b"u1") -> bytes:
    """An array of bytes; `length` cuts its data, and `code` is the type it claims to have."""
    dtype = b"cnumpy\ndtype\n(" + string(code) + b"K\x00K\x01tR"
    dtype += b"(K\x03U\x01|NNN" + number(-1) + number(-1) + b"K\x00tb"
    shape = b"(" + b"".join(map(number, values.shape)) + b"t"
    state = b"(K\x01" + shape + dtype + b"\x89" + string(values.tobytes()[:length]) + b"t"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    return empty + state + b"b"


def numbers(values: list[int]) -> bytes:
    return b"](" + b"".join(map(number, values)) + b"e"


def pickled(**items: bytes) -> bytes:
    """A pickled dictionary of values that are pickled already."""
    content = b"".join(string(key.encode()) + value for key, value in items.items())
    return b"\x80\x02}(" + content + b"u."
