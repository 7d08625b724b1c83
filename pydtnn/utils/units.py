"""Quantities, sizes and shapes as text, in both directions, and tables of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches


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


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}

UNITS: dict[str, dict[str, float]] = {
    "s": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "B": _BYTES,
    "B/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{p}{bit}": f / 8 for bit in ("bit/s", "b/s", "bps") for p, f in _DECIMAL.items()},
    "flop/s": {f"{prefix}flop/s": factor for prefix, factor in _DECIMAL.items()},
}
"""Accepted units by SI unit, with their values in it. Bits and bytes differ: 1 B is 8 bit, and
Gbit/s, Gb/s and Gbps are the same."""

_WRITTEN = {
    "s": ("s", "ms", "us", "ns"),
    "B": ("TB", "GB", "MB", "kB", "B"),
    "B/s": ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "flop/s": ("Pflop/s", "Tflop/s", "Gflop/s", "Mflop/s", "kflop/s", "flop/s"),
}

_QUANTITY = re.compile(r"([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(\D.*)")


def parse_quantity(who: str, text: object, unit: str, *, positive: bool = True) -> float:
    """Return a quantity in its SI unit.

    Parameters
    ----------
    who : str
        Name of the quantity, the first words of errors.
    text : object
        A number followed by a unit, such as "50 us" or "1 Gbit/s".
    unit : str
        The SI unit, a key of `UNITS`.
    positive : bool, default True
        Whether zero is refused.

    Raises
    ------
    ValueError
        If there is no unit, an unknown one, no number, or one that is negative or not finite.

    Examples
    --------
    >>> parse_quantity("latency", "50 us", "s"), parse_quantity("bandwidth", "1 Gbit/s", "B/s")
    (5e-05, 125000000.0)
    >>> parse_quantity("time", 50, "s")
    Traceback (most recent call last):
    ValueError: time: expected a number with a unit (ns, us, ms, s, min, h, d), got 50; write 50 us
    """
    known = UNITS[unit]
    plain = text.strip().replace("\N{MICRO SIGN}", "u") if isinstance(text, str) else ""
    match = _QUANTITY.fullmatch(plain)
    if match is None or match[2] not in known:
        number = _shown(match[1] if match else text if isinstance(text, int | float) else 50)
        lower = {name.lower(): name for name in known}
        meant = get_close_matches(match[2].lower(), lower, 1) if match else []
        written = [lower[one] for one in meant] or _EXAMPLES[unit]
        raise ValueError(
            f"{who}: expected a number with a unit ({', '.join(_named(unit))}), got "
            f"{_shown(text)}; write {' or '.join(f'{number} {name}' for name in written)}"
        )
    value = float(f"{float(match[1]) * known[match[2]]:.15g}")  # 50 us is 5e-05
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        limit = "above" if positive else "of at least"
        raise ValueError(f"{who}: expected a finite quantity {limit} 0, got {text}; correct it")
    return value


def format_quantity(value: float, unit: str, digits: int = 4) -> str:
    """Write a quantity with the largest unit in which it is at least 1.

    >>> format_quantity(5e-5, "s"), format_quantity(125e6, "B/s"), format_quantity(0.0, "s")
    ('50 us', '125 MB/s', '0 s')
    """
    units = _WRITTEN[unit]
    if value == 0:
        return f"0 {unit}"
    rounded = float(f"{value:.{digits}g}")
    name = next((u for u in units if rounded >= UNITS[unit][u] * (1 - 1e-12)), units[-1])
    return f"{float(f'{value / UNITS[unit][name]:.{digits}g}'):.15g} {name}"


def _named(unit: str) -> list[str]:
    """Return the units that an error lists."""
    rare = ("P", "Ki", "Mi", "Gi", "Ti")
    return [n for n in UNITS[unit] if not n.startswith(rare) and not n.endswith(("b/s", "bps"))]


_EXAMPLES = {"s": ["us"], "B": ["GB"], "B/s": ["GB/s", "Gbit/s"], "flop/s": ["Gflop/s"]}


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


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


def duration(seconds: float) -> str:
    """Return a duration in the units in which it is read.

    >>> duration(7.04), duration(125), duration(7320)
    ('7.0 s', '2 min 5 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


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


def memory(nbytes: float) -> str:
    """Format bytes in decimal units.

    >>> memory(2.5e9), memory(8.91e13)
    ('2.50 GB', '89.1 TB')
    """
    return quantity(nbytes, 1000, "B")
