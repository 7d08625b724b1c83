"""64-bit hashes of arrays: XXH64, by which ranks compare arrays without sending them.

Y. Collet, "xxHash fast digest algorithm", version 0.1.1, section "XXH64": not cryptographic, but
every bit of the input affects every bit of the result. Four sums are computed in an interleaved
order, so that their multiplications overlap; `pydtnn.kernels.cpu._hash` computes the same number at
about the speed of memory.
"""

from __future__ import annotations

import numpy as np

PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)

WORD = (1 << 64) - 1


def hash64(array: np.ndarray) -> int:
    """Return the XXH64 hash, with seed 0, of the bytes of an array in C order: 1 us per byte."""
    data = array.tobytes()
    p1, p2, p3, p4, p5 = PRIMES
    rest = 0
    if len(data) >= 32:
        sums = [(p1 + p2) & WORD, p2, 0, -p1 & WORD]
        for rest in range(0, len(data) - 31, 32):
            for i in range(4):
                sums[i] = _round(sums[i], _read(data, rest + 8 * i, 8))
        rest += 32
        value = sum(_rotate(s, n) for s, n in zip(sums, (1, 7, 12, 18), strict=True)) & WORD
        for s in sums:
            value = ((value ^ _round(0, s)) * p1 + p4) & WORD
    else:
        value = p5
    value = (value + len(data)) & WORD
    while rest + 8 <= len(data):
        value = (_rotate(value ^ _round(0, _read(data, rest, 8)), 27) * p1 + p4) & WORD
        rest += 8
    if rest + 4 <= len(data):
        value = (_rotate(value ^ (_read(data, rest, 4) * p1 & WORD), 23) * p2 + p3) & WORD
        rest += 4
    for byte in data[rest:]:
        value = _rotate(value ^ (byte * p5 & WORD), 11) * p1 & WORD
    value = (value ^ value >> 33) * p2 & WORD
    value = (value ^ value >> 29) * p3 & WORD
    return value ^ value >> 32


def _round(total: int, word: int) -> int:
    """Add eight bytes to one of the four sums."""
    return _rotate((total + word * PRIMES[1]) & WORD, 31) * PRIMES[0] & WORD


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & WORD


def _read(data: bytes, start: int, size: int) -> int:
    return int.from_bytes(data[start : start + size], "little")
