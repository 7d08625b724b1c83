"""When checkpoints are written: after steps, epochs or a time, or as often as failures justify."""

from __future__ import annotations

import re
from math import sqrt
from typing import NamedTuple

from pydtnn.utils.units import parse_quantity

AUTO = "auto"
"""The interval that wastes least, from the measured cost of a checkpoint."""

DEFAULT_MTBF = "24 h"
"""Mean time between two failures of a run for which `AUTO` is computed by default."""

_COUNT = re.compile(r"([1-9][0-9]{0,17}) *(steps?|epochs?)")


class Interval(NamedTuple):
    """The interval between checkpoints; one of the attributes is set.

    Attributes
    ----------
    steps, epochs : int or None
    seconds : float or None
    auto : bool
    """

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    auto: bool = False


def parse_interval(who: str, text: str) -> Interval:
    """Return the interval of a text.

    Raises
    ------
    ValueError
        The message begins with `who`.

    Examples
    --------
    >>> parse_interval("every", "200 steps").steps, parse_interval("every", "5min").seconds
    (200, 300.0)
    """
    if text == AUTO:
        return Interval(auto=True)
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        try:
            return Interval(seconds=parse_quantity(who, text, "s"))
        except ValueError as error:
            raise ValueError(
                f"{who} must be a time such as 5min, steps such as '200 steps', epochs such as "
                f"'2 epochs', or auto, got {text!r}"
            ) from error
    count = int(found[1])
    return Interval(steps=count) if found[2].startswith("step") else Interval(epochs=count)


def optimal_interval(cost: float, mtbf: float) -> float:
    """Return the time of computation between two checkpoints that wastes least, in s.

    Parameters
    ----------
    cost : float
        Time by which a checkpoint delays training, in s.
    mtbf : float
        Mean time between two failures, in s.

    References
    ----------
    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
    2006, equation 37.

    Examples
    --------
    >>> round(optimal_interval(10, 86400))  # Young: the square root of 2 x 10 x 86400, 1315
    1308
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return sqrt(2 * cost * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost
