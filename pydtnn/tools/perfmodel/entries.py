"""Names of achieved rates in platform files: class of kernels, channels and direction."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from pydtnn.utils.names import unknown

WITH_RATES = (
    *("conv 1x1", "conv 1x1 fused", "conv 3x3", "conv 3x3 fused", "conv other"),
    *("conv other fused", "conv depthwise", "conv of images", "linear"),
)
"""Classes whose times depend on operations, and whose rates depend on channels."""

WITH_BANDWIDTHS = ("norm", "pool", "elementwise")
"""Classes whose times depend on bytes."""

UPDATE = "update"
"""The bandwidth of an optimizer's update."""

DTYPES = ("float32", "float64", "bfloat16", "float16", "tfloat32")

DIRECTIONS = ("forward", "backward")


class KernelClass(NamedTuple):
    """A class of kernels.

    Attributes
    ----------
    name : str
        One of `WITH_RATES` or `WITH_BANDWIDTHS`.
    size : int
        Geometric mean of the channels of input and output; 0 where the rate is a bandwidth.
    """

    name: str
    size: int = 0

    def entry(self, direction: str) -> str:
        """Return the name of its rate in a platform file.

        >>> KernelClass("conv 3x3", 64).entry("forward")
        'conv 3x3, 64, forward'
        """
        return ", ".join(filter(None, [self.name, str(self.size or ""), direction]))


def read_rate(entry: str) -> tuple[KernelClass, str]:
    """Return class and direction of the name of a rate.

    Raises
    ------
    ValueError
        If there is no such rate.
    """
    found = re.fullmatch(r"(.+), *([1-9][0-9]*), *(.+)", entry)
    if found is None:
        raise ValueError(
            f"rates: expected a class, channels and a direction as in 'conv 3x3, 64, forward', got "
            f"{entry!r}; correct it"
        )
    name, size, direction = found.groups()
    check("rates", "class", name, WITH_RATES)
    check("rates", "direction", direction, DIRECTIONS)
    return KernelClass(name, int(size)), direction


def check(who: str, kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError if a name is not known."""
    if name not in known:
        raise ValueError(f"{who}: {unknown(kind, name, known)}")


def check_bandwidth(entry: str) -> None:
    """Raise ValueError if there is no such bandwidth."""
    known = [f"{name}, {direction}" for name in WITH_BANDWIDTHS for direction in DIRECTIONS]
    check("bandwidths", "class", entry, (*known, UPDATE))
