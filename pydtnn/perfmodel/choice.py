"""Why a strategy was chosen: the fastest ones beside each other, and what limits the best."""

from __future__ import annotations

from pydtnn.perfmodel.projection import Projection
from pydtnn.perfmodel.search import Found, describe
from pydtnn.utils.text_table import align, quantity

FEW = 5
"""Strategies that are listed."""

COLUMNS = ("strategy", "ms/step", "compute", "update", "messages", "idle", "loader", "memory")


def ranked(found: Found, most: int = FEW) -> list[str]:
    """Return a table of the fastest strategies, with times of a step in ms."""
    shown, seen = [], set()
    for one in found.tried:
        name = label(one)
        if name not in seen and len(shown) < most:
            seen.add(name)
            shown.append([name, *cells(one)])
    return align([[*COLUMNS], *shown], 1)


def label(one: Projection) -> str:
    """Return a strategy's name, with a note if its plan was found layer by layer."""
    return one.strategy.name + (", layer by layer" if isinstance(one.strategy.plan, dict) else "")


def cells(one: Projection) -> list[str]:
    """Return the parts of a step in ms, and the memory of a rank."""
    step = one.step
    compute = step.compute - step.update
    parts = (one.seconds, compute, step.update, step.exposed, step.idle, one.loader)
    return [*map(milliseconds, parts), quantity(one.memory.total, 1024, "B")]


def milliseconds(seconds: float) -> str:
    """Return a time in ms with three digits, without an exponent.

    >>> milliseconds(1.2345), milliseconds(0.00012345)
    ('1234', '0.123')
    """
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bottleneck(one: Projection) -> str:
    """Return the largest part of a step in words.

    Returns
    -------
    str
        For example "compute takes 80 % of a step, most of it in conv2 (3.1 ms)".
    """
    step = one.step
    parts = {
        "compute": step.compute - step.update,
        "the update of parameters": step.update,
        "messages of layers": step.layers_exposed,
        "the exchange of gradients": step.gradients_exposed,
        "waiting for other stages": step.idle,
        "the loader": one.loader,
    }
    name = max(parts, key=parts.__getitem__)
    text = f"{name} takes {parts[name] / one.seconds:.0%} of a step"
    key = {"compute": "compute", "messages of layers": "exchange"}.get(name)
    if key is None or not step.layers:
        return text
    layer = max(step.layers, key=lambda own: getattr(own, key))
    return f"{text}, most of it in {layer.name} ({milliseconds(getattr(layer, key))} ms)"


def plan_lines(one: Projection) -> list[str]:
    """Return the layers with a strategy of their own, in words; none for uniform plans."""
    plan = one.strategy.plan
    return [f"plan: {line}" for line in describe(plan, plan)] if isinstance(plan, dict) else []


def explain(found: Found, limit: float) -> str:
    """Return why the best strategy was chosen, in one line.

    Parameters
    ----------
    found : Found
    limit : float
        Memory of a rank, in B.
    """
    best = found.best
    others = [one for one in found.tried if one.strategy.axes != best.strategy.axes]
    than = next((one for one in others if one.memory.total <= limit), None)
    faster = ""
    if than is not None:
        faster = f", {than.seconds / best.seconds:.2f} times as fast as {than.strategy.name}"
    dropped = sum(one.memory.total > limit for one in found.tried)
    memory = f"{quantity(best.memory.total, 1024, 'B')} of {quantity(limit, 1024, 'B')} per rank"
    without = f"; {dropped} others do not fit into memory" if dropped else ""
    return (
        f"{label(best)}: {milliseconds(best.seconds)} ms per step by the model{faster}; "
        f"{bottleneck(best)}; memory {memory}{without}"
    )
