"""Search of a plan for each layer of a network."""

from typing import TYPE_CHECKING

from pydtnn.tools.perfmodel.search.plans import SCHEDULES, SearchResult, describe, search
from pydtnn.tools.perfmodel.search.solver import Solution, Unit, UnitOption, solve
from pydtnn.utils.moved import renamed

__all__ = [
    "SCHEDULES",
    "SearchResult",
    "Solution",
    "Unit",
    "UnitOption",
    "describe",
    "search",
    "solve",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = renamed(__name__)
