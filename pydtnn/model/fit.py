"""Check that named arrays fit a model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pydtnn.utils.suggest import some

FEW = 4
"""Number of names up to which a difference is listed; more belong to another network."""


def check_fit(own: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> None:
    """Check that two sets of named arrays have the same names and shapes.

    Raises
    ------
    ValueError
        The message lists missing and unknown names and shapes that differ, or if many names
        differ, the sizes of both networks.
    """
    missing = [name for name in own if name not in given]
    surplus = [name for name in given if name not in own]
    if len(missing) + len(surplus) > FEW:
        raise ValueError(
            f"weights do not fit the model: they are of another network, with {describe(given)}, "
            f"got {describe(own)}; create the network with which they were saved ({len(missing)} "
            f"names are missing and {len(surplus)} are unknown, such as {(missing + surplus)[0]})"
        )
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is unknown" for name in surplus]
    problems += [
        f"{name} has shape {given[name].shape} instead of {own[name].shape}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError(f"weights do not fit the model: {some(problems)}")


def describe(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the number of parameters, without running statistics.

    >>> describe({"fc.w": np.zeros((3, 4)), "norm.running_mean": np.zeros(3)})
    '12 parameters in 1 array'
    """
    shapes = [array.shape for name, array in arrays.items() if ".running_" not in name]
    plural = "s" * (len(shapes) != 1)
    return f"{sum(map(math.prod, shapes)):,} parameters in {len(shapes)} array{plural}"
