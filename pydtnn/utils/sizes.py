"""Sizes in words: of memory, and of samples."""

from __future__ import annotations

import re

PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(who: str, text: str) -> int:
    """Return the bytes of a size such as "2GiB", "500 MB" or "1.5G".

    Parameters
    ----------
    who : str
        First word of the error.
    text : str
        A number with a unit: B, or K, M, G, T with B (powers of 1000), with iB or alone (powers of
        1024). Without a unit, bytes.

    Raises
    ------
    ValueError

    Examples
    --------
    >>> parse_size("limit", "1.5 KiB"), parse_size("limit", "2kB"), parse_size("limit", "3M")
    (1536, 2000, 3145728)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?b)?", text.strip().lower())
    size = 0
    if found is not None and (found[2] or found[3] != "ib"):
        base = 1000 if found[3] == "b" else 1024
        size = round(float(found[1]) * base ** PREFIXES[found[2]])
    if not size:
        raise ValueError(f"{who}: expected a size such as 500MiB or 2GiB, got {text!r}")
    return size


def parse_shape(who: str, text: str) -> tuple[int, ...]:
    """Return the shape of a sample, of which the numbers are separated by commas, or by "x".

    >>> parse_shape("--shape", "224,224,3"), parse_shape("--shape", "8x8")
    ((224, 224, 3), (8, 8))

    Raises
    ------
    ValueError
    """
    if not re.fullmatch(r"[1-9]\d{,8}(?:[x,] ?[1-9]\d{,8})*", text.strip()):
        raise ValueError(f"{who}: expected a shape such as 224,224,3, got {text!r}")
    return tuple(map(int, re.findall(r"\d+", text)))
