"""Comparison of named arrays with those of a model, and their checksum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pydtnn.utils.names import shorten

MAX_LISTED_NAMES = 4
"""Number of names up to which a difference is listed; more belong to another network."""


@dataclass(frozen=True)
class LoadReport:
    """Result of loading named arrays into a model; ``print(report)`` lists the names.

    Attributes
    ----------
    loaded : tuple of str
        Arrays of the model that were replaced.
    missing : tuple of str
        Arrays of the model that were not given; they are unchanged.
    unexpected : tuple of str
        Given arrays that the model does not have; they are not used.
    mismatched : dict of str to (tuple of int, tuple of int)
        Arrays whose shapes differ, which are unchanged: the given shape and that of the model.
    own, given : str
        Numbers of parameters of the model and of the given arrays.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    own: str = ""
    given: str = ""

    def check(self, *, strict: bool, advise: bool = False) -> None:
        """Raise ValueError if nothing fits the model, or, if `strict`, not everything does.

        Raises
        ------
        ValueError
            The message lists missing and unknown names and shapes that differ, or if many names
            differ, the sizes of both networks.
        """
        if self.loaded and not strict:
            return
        which = "weights do not fit" if strict else "no array fits"
        surplus = (*self.missing, *self.unexpected)
        if strict and len(surplus) > MAX_LISTED_NAMES:
            raise ValueError(
                f"{which} the model: they are of another network, with {self.given}, "
                f"got {self.own}; create the network with which they were saved "
                f"({len(self.missing)} names are missing and {len(self.unexpected)} are unknown, "
                f"such as {surplus[0]})"
            )
        problems = [f"{name} is missing" for name in self.missing]
        problems += [f"{name} is unknown" for name in self.unexpected]
        problems += [
            f"{name} has shape {given} instead of {own}"
            for name, (given, own) in self.mismatched.items()
        ]
        if problems:
            advice = advice_of(self.mismatched.values()) if advise and self.mismatched else ""
            raise ValueError(f"{which} the model: {shorten(problems)}{advice}")

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        shapes = [f"{name} {given} for {own}" for name, (given, own) in self.mismatched.items()]
        lines = [f"loaded {len(self.loaded)} of {total} arrays"]
        lines += [
            f"  {what}: {shorten(names)}"
            for what, names in (
                ("missing, not changed", self.missing),
                ("other shape, not changed", shapes),
                ("unexpected, not used", self.unexpected),
            )
            if names
        ]
        return "\n".join(lines)


def advice_of(shapes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Return the end of an error's sentence about arrays of other shapes than those of a model.

    >>> "images" in advice_of([((64, 3, 3, 3), (64, 3, 7, 7))])
    True
    >>> "images" in advice_of([((64, 16, 3, 5), (64, 32, 16, 7))])
    False
    """
    images = any(
        len(a) == len(b) == 4 and a[0] == b[0] and (a[1] == b[1] or a[3] == b[3]) for a, b in shapes
    )
    stem = "; the first layers depend on the size of images: use at least 64 x 64" * images
    return f"{stem}; strict=False, --partial or --load FILE:strict=false loads what fits"


def compare(own: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> LoadReport:
    """Compare the names and shapes of a model's arrays with given ones.

    Parameters
    ----------
    own, given : mapping of str to ndarray
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"Model.load: expected arrays by name, as Model.state returns them, got {given!r}; use "
            "pydtnn.load(path), or pydtnn.weights.load_weights(model, path)"
        )
    common = {name: (given[name].shape, own[name].shape) for name in own if name in given}
    return LoadReport(
        loaded=tuple(name for name, (theirs, ours) in common.items() if theirs == ours),
        missing=tuple(name for name in own if name not in given),
        unexpected=tuple(name for name in given if name not in own),
        mismatched={name: shapes for name, shapes in common.items() if shapes[0] != shapes[1]},
        own=describe(own),
        given=describe(given),
    )


def checksum(arrays: Iterable[np.ndarray]) -> str:
    """Return a checksum of the elements of arrays, which ranks compare."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def describe(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the number of parameters, without running statistics.

    >>> describe({"fc.w": np.zeros((3, 4)), "norm.running_mean": np.zeros(3)})
    '12 parameters in 1 array'
    """
    shapes = [array.shape for name, array in arrays.items() if ".running_" not in name]
    plural = "s" * (len(shapes) != 1)
    return f"{sum(map(math.prod, shapes)):,} parameters in {len(shapes)} array{plural}"
