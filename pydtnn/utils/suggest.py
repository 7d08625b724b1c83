"""Names in error messages: suggestions for unknown names, and abbreviated lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from pydtnn.utils.foreign_members import VALUES

MIN_CONTAINED = 4
"""Length of names from which one that contains another is suggested for it, and the reverse."""


def unknown(kind: str, name: str, choices: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return a message for an unknown name, with the nearest of `choices`, or all if none is near.

    Names of other libraries are answered from `VALUES`. Otherwise names that contain the given one,
    or are contained in it, precede those of similar spelling. Names in `also` are suggested if they
    are near, but not listed.

    >>> unknown("data set", "cifer10", ["mnist", "cifar10", "cifar100"])
    "unknown data set 'cifer10'; did you mean 'cifar10' or 'cifar100'?"
    >>> unknown("schedule", "xyz", ["constant", "cosine"])
    "unknown schedule 'xyz'; choose one of 'constant', 'cosine'"
    >>> unknown("value of --device", "gpu", ["cpu", "cuda"])
    "unknown value of --device 'gpu'; use 'cuda'"
    """
    answers = VALUES.get(kind.removeprefix("value of --"), {})
    if answer := answers.get(name.strip().lower().replace("-", "_").replace(" ", "_")):
        return f"unknown {kind} {name!r}; {answer}"
    by_lower = {_bare(choice): choice for choice in choices}
    others = {_bare(choice): choice for choice in also} | by_lower
    given = _bare(name)
    near = [
        other
        for other in others
        if min(len(other), len(given)) >= MIN_CONTAINED and (other in given or given in other)
    ]
    near = sorted(near, key=lambda other: abs(len(other) - len(given)))[:3]
    near = near or difflib.get_close_matches(given, others, n=3, cutoff=0.65)
    if near:
        return (
            f"unknown {kind} {name!r}; did you mean {' or '.join(repr(others[n]) for n in near)}?"
        )
    if not by_lower:
        return f"unknown {kind} {name!r}; there is none to choose from"
    return (
        f"unknown {kind} {name!r}; choose one of {', '.join(map(repr, sorted(by_lower.values())))}"
    )


def _bare(name: str) -> str:
    """Return a name in lower case without dashes before it, which all options have in common."""
    return name.lower().lstrip("-")


def some(items: Sequence[str], most: int = 8) -> str:
    """Return the first few items and the number of the others.

    >>> some(["a", "b", "c", "d"], most=2), some([])
    ('a, b and 2 more', 'nothing')
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more or "nothing"
