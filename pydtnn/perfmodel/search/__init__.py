"""Search of a plan for each layer of a network."""

from pydtnn.perfmodel.search.plans import SearchResult, describe, search
from pydtnn.perfmodel.search.solver import Option, Solution, Unit, solve

__all__ = ["SearchResult", "Option", "Solution", "Unit", "describe", "search", "solve"]
