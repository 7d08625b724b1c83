"""Tables in plain text, and numbers with prefixes."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Pad the cells of each column to its widest; the first `left` columns to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def quantity(value: float, base: int, unit: str = "") -> str:
    """Format a number with three digits and a prefix.

    >>> quantity(81_900_000, 1000) + "flop"
    '81.9 Mflop'
    >>> quantity(1536, 1024, "B")
    '1.50 KiB'
    """
    for prefix in ("", "K", "M", "G", "T"):
        if value < base or prefix == "T":
            break
        value /= base
    if not prefix:
        return f"{value:.0f} {unit}"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {prefix}{'i' * (base == 1024)}{unit}"
