"""Lines on a search: its trials, their results, the best of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydtnn.search.space import Space
from pydtnn.search.study import GROUP, REASON
from pydtnn.utils.units import duration


def best_of(space: Space, trials: Sequence[Any]) -> list[Any]:
    """Return the best trial that is complete, of several objectives those that none surpasses."""
    signs = [-1.0 if one == "maximize" else 1.0 for one in space.objective.values()]
    done = [one for one in trials if one.state.name == "COMPLETE"]
    costs = {one.number: [s * v for s, v in zip(signs, one.values, strict=True)] for one in done}

    def surpassed(one: Any) -> bool:
        mine = costs[one.number]
        return any(
            theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True))
            for theirs in costs.values()
        )

    best = [one for one in done if not surpassed(one)]
    return best[:1] if len(signs) == 1 else best


def seconds_of(one: Any) -> float:
    """Return how long a trial was trained, in s."""
    spans = one.user_attrs.get(GROUP, [])
    return sum((span["end"] or span["begin"]) - span["begin"] for span in spans)


def spans_of(trials: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return what groups of ranks have trained: trials, each with one of its spans of time."""
    return [(one, span) for one in trials for span in one.user_attrs.get(GROUP, []) if span["end"]]


def use_of(trials: Sequence[Any]) -> tuple[float, float]:
    """Return the share of the time of the ranks in which they trained, and this time in s.

    Spans of trials that have ended their job, or a rank, are not known.
    """
    spans = [span for _, span in spans_of(trials)]
    if not spans:
        return 0.0, 0.0
    whole = max(span["end"] for span in spans) - min(span["begin"] for span in spans)
    ranks = {(span["host"], span["job"], rank) for span in spans for rank in span["ranks"]}
    busy = sum((span["end"] - span["begin"]) * len(span["ranks"]) for span in spans)
    return (busy / (whole * len(ranks)) if whole else 1.0), whole


def show_value(value: Any) -> str:
    """Return a value of a dimension as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def result_of(space: Space, one: Any) -> str:
    """Return the values of a trial that is complete, or how far it has come."""
    if one.state.name == "COMPLETE":
        pairs = zip(space.objective, one.values, strict=True)
        return "  ".join(f"{name} {value:.4g}" for name, value in pairs)
    if one.state.name == "PRUNED":
        epoch = max(one.intermediate_values)
        value = one.intermediate_values[epoch]
        return f"pruned after epoch {epoch}, {next(iter(space.objective))} {value:.4g}"
    return f"failed: {one.user_attrs.get(REASON, 'unknown')}"


def describe_trial(space: Space, trials: Sequence[Any], number: int) -> str:
    """Return the line of a trial that has ended."""
    one = trials[number]
    options = "  ".join(f"{name} {show_value(value)}" for name, value in one.params.items())
    best = "  best" if one in best_of(space, trials) else ""
    ended = sum(one.state.is_finished() for one in trials)
    return (
        f"{ended}/{space.trials}  trial {number}  {options}  {result_of(space, one)}{best}  "
        f"{duration(seconds_of(one))}"
    )


def describe_search(space: Space, groups: Sequence[int], folder: str) -> str:
    """Return the first line of a search, whose groups have so many ranks."""

    def count(number: int, what: str) -> str:
        return f"{number} {what}{'s' * (number != 1)}"

    sizes = Counter(groups).items()
    parts = " and ".join(f"{count(n, 'group')} of {count(size, 'rank')}" for size, n in sizes)
    return (
        f"search: {count(space.trials, 'trial')} of {count(len(space.dimensions), 'option')}, "
        f"{parts}, study {folder}"
    )
