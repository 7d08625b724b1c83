"""Why a strategy was chosen: the fastest ones beside each other, and what limits the best."""

from __future__ import annotations

from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.search import SearchResult, describe, search
from pydtnn.utils import plain_yaml
from pydtnn.utils.units import align, quantity

MAX_LISTED = 5
"""Strategies that are listed."""

COLUMNS = ("strategy", "ms/step", "compute", "update", "messages", "idle", "loader", "memory")


def ranked(found: SearchResult) -> list[str]:
    """Return a table of the fastest strategies, with times of a step in ms."""
    rows: dict[str, list[str]] = {}
    for one in found.tried:
        step = one.step
        compute = step.compute - step.update
        parts = (one.seconds, compute, step.update, step.exposed, step.idle, one.loader)
        size = quantity(one.memory.total, 1024, "B")
        rows.setdefault(label(one), [*map(milliseconds, parts), size])
    return align([[*COLUMNS], *([name, *rows[name]] for name in [*rows][:MAX_LISTED])], 1)


def label(one: Prediction) -> str:
    """Return a strategy's name; plans that were found layer by layer have a note."""
    return one.work.strategy + (", layer by layer" if isinstance(one.work.plan, dict) else "")


def milliseconds(seconds: float) -> str:
    """Return a time in ms with three digits, without an exponent.

    >>> milliseconds(1.2345), milliseconds(0.00012345)
    ('1234', '0.123')
    """
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def explain(found: SearchResult, limit: float) -> list[str]:
    """Return why the best strategy was chosen: a line, the fastest ones, and its plan if any.

    Parameters
    ----------
    found : SearchResult
    limit : float
        Memory of a rank, in B.
    """
    best = found.best

    def way(one: Prediction) -> tuple[object, ...]:
        return one.work.axes, one.work.pipeline_schedule, one.work.scheme

    slower = [one for one in found.tried if way(one) != way(best) and one.seconds >= best.seconds]
    than = next((one for one in slower if one.memory.total <= limit), None)
    faster = ""
    if than is not None:
        faster = f", {than.seconds / best.seconds:.2f} times as fast as {label(than)}"
    dropped = sum(one.memory.total > limit for one in found.tried)
    memory = f"{quantity(best.memory.total, 1024, 'B')} of {quantity(limit, 1024, 'B')} per rank"
    without = f"; {dropped} others do not fit into memory" if dropped else ""
    line = (
        f"{label(best)}: {milliseconds(best.seconds)} ms per step by the model{faster}; "
        f"limited by {best.bottleneck}; memory {memory}{without}"
    )
    plan = best.work.plan  # uniform plans are not of layers
    layers = describe(plan) if isinstance(plan, dict) else []
    return [line, *ranked(found), *(f"plan: {one}" for one in layers)]


def search_lines(projector: Projector, ranks: int) -> tuple[SearchResult, list[str]]:
    """Return the result of a search, and the lines that explain it and how to train with it.

    Raises
    ------
    ValueError
        If no strategy is possible.
    """
    found = search(projector, ranks)
    best, lines = found.best, explain(found, projector.platform.cluster.memory_per_rank)
    if best.work.plan is not None:
        lines.append(f"gain over the best uniform plan: {found.gain:.2f}")
    options = [f"--parallel {best.work.parallel}"] if best.work.cut else []
    if best.work.plan is not None:
        options.append(f"--plan '{plain_yaml.dump(best.work.plan)}'")
    if best.work.scheme != projector.work.scheme:
        options.append(f"--scheme {best.work.scheme}")
    if best.work.recompute is not None:
        options.append(f"--recompute {best.work.recompute}")
    return found, [
        f"{ranks} ranks: {lines[0]}",
        *lines[1:],
        f"train with: {' '.join(options) or 'no options'}",
    ]
