"""Closed formulas of collective operations: a table, and its evaluation for groups on hosts."""

from pydtnn.perfmodel.formulas.placed import (
    Links,
    Phase,
    Placed,
    Placement,
    allreduce_terms,
    phases,
    seconds,
)
from pydtnn.perfmodel.formulas.table import ALGORITHMS, NONE, Terms, terms_of

__all__ = [
    "ALGORITHMS",
    "NONE",
    "Links",
    "Phase",
    "Placed",
    "Placement",
    "Terms",
    "allreduce_terms",
    "phases",
    "seconds",
    "terms_of",
]
