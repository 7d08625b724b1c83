"""Selection of parameters by patterns of their dotted names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from pydtnn.utils.names import unknown


def select(who: str, patterns: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that match any of the patterns, in their order.

    A pattern is the name of a parameter, of a layer or of a block that contains it, or has the
    wildcards of `fnmatch`, which also match dots.

    Parameters
    ----------
    who : str
        First word of the error.
    patterns : sequence of str
    names : iterable of str
        Dotted names of parameters, such as "stage1.0.conv1.w".

    Raises
    ------
    TypeError, ValueError
        If a pattern is not a string, or matches no name.

    Examples
    --------
    >>> names = ["stem.w", "stage1.0.w", "stage1.0.b", "head.w"]
    >>> select("freeze", ["stage1", "stem"], names)
    ('stem.w', 'stage1.0.w', 'stage1.0.b')
    >>> select("freeze", ["*.b"], names)
    ('stage1.0.b',)
    """
    names = tuple(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{who}: expected names of layers as text, got {pattern!r}")
        if not any(matches(pattern, name) for name in names):
            parts = [prefixes(name) for name in names]
            near = unknown("layer", pattern, dict.fromkeys(part for own in parts for part in own))
            if "did you mean" not in near:
                near = unknown("layer", pattern, dict.fromkeys(own[0] for own in parts))
            raise ValueError(f"{who}: {near}")
    return tuple(name for name in names if any(matches(pattern, name) for pattern in patterns))


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the name of a parameter, or of a layer that contains it.

    >>> matches("stage?.0", "stage1.0.w"), matches("stage1", "stage10.w")
    (True, False)
    """
    return any(fnmatchcase(part, pattern) for part in prefixes(name))


def prefixes(name: str) -> list[str]:
    """Return the names of all blocks that contain a parameter, of its layer, and its own.

    >>> prefixes("stage1.0.w")
    ['stage1', 'stage1.0', 'stage1.0.w']
    """
    return list(accumulate(name.split("."), "{}.{}".format))
