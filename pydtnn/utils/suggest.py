"""Names in error messages: suggestions for unknown names, and abbreviated lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def unknown(kind: str, name: str, choices: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return a message for an unknown name, with the nearest of `choices`, or all if none is near.

    Names in `also` are suggested if they are near, but not listed.

    >>> unknown("data set", "cifer10", ["mnist", "cifar10", "cifar100"])
    "unknown data set 'cifer10'; did you mean 'cifar10' or 'cifar100'?"
    >>> unknown("schedule", "xyz", ["constant", "cosine"])
    "unknown schedule 'xyz'; choose one of 'constant', 'cosine'"
    """
    by_lower = {choice.lower(): choice for choice in choices}
    others = {choice.lower(): choice for choice in also} | by_lower
    near = difflib.get_close_matches(name.lower(), others, n=3)
    if near:
        return (
            f"unknown {kind} {name!r}; did you mean {' or '.join(repr(others[n]) for n in near)}?"
        )
    if not by_lower:
        return f"unknown {kind} {name!r}; there is none to choose from"
    return (
        f"unknown {kind} {name!r}; choose one of {', '.join(map(repr, sorted(by_lower.values())))}"
    )


def some(items: Sequence[str], most: int = 8) -> str:
    """Return the first few items and the number of the others.

    >>> some(["a", "b", "c", "d"], most=2), some([])
    ('a, b and 2 more', 'nothing')
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more or "nothing"
