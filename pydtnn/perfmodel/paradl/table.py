"""Projections as a table, with published and corrected values beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydtnn.perfmodel.paradl.case import Case, Projection
from pydtnn.perfmodel.paradl.corrected import CORRECTIONS
from pydtnn.perfmodel.paradl.projection import project
from pydtnn.utils.units import align

COLUMNS = ("memory/B", "compute/s", "messages/s", "epoch/s", "rank min")


def table(cases: Iterable[Case], formulas: Sequence[str]) -> list[str]:
    """Return the lines of a table: a row per case, for each of the formulas its columns.

    Parameters
    ----------
    cases : iterable of Case
    formulas : sequence of str
        Keys of `FORMULAS`.
    """
    blocks = [name if i == 0 else "" for name in formulas for i in range(len(COLUMNS))]
    rows = [["", "", "", *blocks, ""]]
    rows.append(["strategy", "ranks", "batch", *COLUMNS * len(formulas), "limit"])
    for case in cases:
        found = [project(case, name) for name in formulas]
        cells = [cell for one in found for cell in _cells(one)]
        name = case.strategy if case.groups == 1 else f"{case.strategy} {case.groups}x{case.parts}"
        rows.append([name, str(case.ranks), str(case.batch), *cells, _problem(found)])
    return align(rows, 1)


def corrections() -> list[str]:
    """Return a line per correction of the corrected formulas."""
    return align([[name, text] for name, text in CORRECTIONS.items()], 2)


def _problem(found: Sequence[Projection]) -> str:
    problems = {one.formulas: one.problem for one in found if one.problem}
    if len({*problems.values()}) == 1 and len(problems) == len(found):
        return found[0].problem
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def _cells(one: Projection) -> list[str]:
    values = (one.memory, one.compute, one.communication, one.seconds)
    return [*(f"{value:.12g}" for value in values), str(one.cost)]
