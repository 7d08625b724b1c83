"""Checks of named arrays that are loaded into a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from pydtnn.utils.suggest import some


def check_fit(own: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> None:
    """Check that two sets of named arrays have the same names and shapes.

    Raises
    ------
    ValueError
        The message lists missing and unknown names and shapes that differ.
    """
    problems = [f"{name} is missing" for name in own if name not in given]
    problems += [f"{name} is unknown" for name in given if name not in own]
    problems += [
        f"{name} has shape {given[name].shape} instead of {own[name].shape}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError(f"weights do not fit the model: {some(problems)}")


def checksum(arrays: Iterable[np.ndarray]) -> str:
    """Return a checksum of the elements of arrays, which ranks compare."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
