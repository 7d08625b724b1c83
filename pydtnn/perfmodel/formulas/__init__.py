"""Closed formulas of collective operations: a table, and its evaluation for groups on hosts."""

from pydtnn.perfmodel.formulas.placed import Links, Placement, allreduce_terms, combine, seconds
from pydtnn.perfmodel.formulas.table import ALGORITHMS, NONE, Terms, terms_of

__all__ = [
    "ALGORITHMS",
    "NONE",
    "Links",
    "Placement",
    "Terms",
    "allreduce_terms",
    "combine",
    "seconds",
    "terms_of",
]
