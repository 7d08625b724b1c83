"""Lines on a search: its trials, their results, the best of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydtnn.tools.search.space import Space
from pydtnn.tools.search.study import GROUP, REASON
from pydtnn.utils.names import shorten
from pydtnn.utils.units import duration


def best_of(space: Space, trials: Sequence[Any]) -> list[Any]:
    """Return the best trial that is complete, of several objectives those that none surpasses."""
    signs = [-1.0 if one == "maximize" else 1.0 for one in space.objective.values()]
    done = [one for one in trials if one.state.name == "COMPLETE"]
    costs = {one.number: [s * v for s, v in zip(signs, one.values, strict=True)] for one in done}
    if len(signs) == 1:
        return [min(done, key=lambda one: costs[one.number])] if done else []

    def surpassed(one: Any) -> bool:
        mine = costs[one.number]
        return any(
            theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True))
            for theirs in costs.values()
        )

    return [one for one in done if not surpassed(one)]


def seconds_of(one: Any) -> float:
    """Return how long a trial was trained, in s."""
    spans = one.user_attrs.get(GROUP, [])
    return float(sum(span["end"] - span["begin"] for span in spans if span["end"]))


def options_of(one: Any) -> str:
    """Return the options of a trial as text."""
    texts = {n: f"{v:.4g}" if isinstance(v, float) else str(v) for n, v in one.params.items()}
    return "  ".join(f"{name} {text}" for name, text in texts.items())


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
    """Return the line of a trial that has ended, with how many had ended then."""
    one = trials[number]
    when = one.datetime_complete
    ended = [t for t in trials if t.datetime_complete and not (when and t.datetime_complete > when)]
    parts = [f"{len(ended)}/{space.trials}", f"trial {number}", options_of(one)]
    parts += [result_of(space, one), *(["best"] if one in best_of(space, ended) else [])]
    return "  ".join([*parts, duration(seconds_of(one))])


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


def describe_earlier(space: Space, trials: Sequence[Any]) -> str:
    """Return what a study has from earlier jobs or has in progress; empty for a new study."""
    ended = [one for one in trials if one.state.is_finished()]
    begun = [one for one in trials if one.state.name == "RUNNING"]
    epochs = [
        f"trial {t.number} after epoch {max(t.intermediate_values, default=0)}" for t in begun
    ]
    going = f"; in progress: {shorten(epochs, 4)}" if begun else ""
    return f"continuing: {len(ended)}/{space.trials} trials have ended{going}" if trials else ""
