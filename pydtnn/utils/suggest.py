"""The sentence for a name that nobody knows: it offers the names the user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """Say that `name` is no `kind`, and offer the nearest of `choices`, or all if none is near.

    >>> unknown("data set", "cifer10", ["mnist", "cifar10", "cifar100"])
    "unknown data set 'cifer10'; did you mean 'cifar10' or 'cifar100'?"
    >>> unknown("schedule", "xyz", ["constant", "cosine"])
    "unknown schedule 'xyz'; choose one of 'constant', 'cosine'"
    """
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3)
    if near:
        return (
            f"unknown {kind} {name!r}; did you mean {' or '.join(repr(by_lower[n]) for n in near)}?"
        )
    if not by_lower:
        return f"unknown {kind} {name!r}; there is none to choose from"
    return (
        f"unknown {kind} {name!r}; choose one of {', '.join(map(repr, sorted(by_lower.values())))}"
    )
