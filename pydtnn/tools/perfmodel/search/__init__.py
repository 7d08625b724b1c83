"""Search of a plan for each layer of a network."""

from pydtnn.tools.perfmodel.search.plans import SCHEDULES, SearchResult, compare, describe, search
from pydtnn.tools.perfmodel.search.solver import Option, Solution, Unit, solve

__all__ = [
    "SCHEDULES",
    "SearchResult",
    "Option",
    "Solution",
    "Unit",
    "compare",
    "describe",
    "search",
    "solve",
]
