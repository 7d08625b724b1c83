"""Messages of several arrays, and messages from each rank to all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.request import Request

Lengths = Sequence[int] | np.ndarray
"""Number of elements of each of several arrays."""


def pack(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the bytes of arrays, each at a multiple of its element size.

    Returns
    -------
    ndarray of uint8
    """
    lengths = [part.size for part in parts]
    packed = np.empty(size_of(parts, lengths), np.uint8)
    for part, place in zip(parts, unpack(packed, parts, lengths), strict=True):
        place[...] = part
    return packed


def unpack(
    packed: np.ndarray, like: Sequence[np.ndarray], lengths: Lengths
) -> tuple[np.ndarray, ...]:
    """Return the packed arrays, as views.

    Parameters
    ----------
    packed : ndarray of uint8
        Result of `pack`, or an empty array of that length, aligned as NumPy aligns new arrays.
    like : sequence of ndarray
        Arrays of the same types.
    lengths : Lengths
    """
    starts, _ = _layout(like, lengths)
    return tuple(
        packed[start : start + length * part.itemsize].view(part.dtype)
        for start, length, part in zip(starts, lengths, like, strict=True)
    )


def _layout(like: Sequence[np.ndarray], lengths: Lengths) -> tuple[list[int], int]:
    """Return the offset of each array and the total length, in B."""
    starts, end = [], 0
    for part, length in zip(like, lengths, strict=True):
        start = -(-end // part.itemsize) * part.itemsize
        starts.append(start)
        end = start + length * part.itemsize
    return starts, end


def size_of(like: Sequence[np.ndarray], lengths: Lengths) -> int:
    """Return the length of a message, in B."""
    return _layout(like, lengths)[1]


def send_to_all(comm: Communicator, arrays: Sequence[np.ndarray], tag: int) -> Iterator[Request]:
    """Send this rank's array to all others and receive theirs; yield the requests.

    Parameters
    ----------
    comm : Communicator
    arrays : sequence of ndarray
        One array per rank, as long as the array of that rank; all but this rank's are written.
    tag : int

    Yields
    ------
    Request
    """
    # Each rank starts with its next neighbour, so that no rank is the first target of all others.
    others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
    receives = [comm.irecv(arrays[other], other, tag) for other in reversed(others)]
    sends = [comm.isend(arrays[comm.rank], other, tag) for other in others]
    yield from receives
    yield from sends
