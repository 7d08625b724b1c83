"""Closed formulas of collective operations: a table, and its evaluation for groups on hosts."""

from pydtnn.perfmodel.formulas.placed import (
    PLAIN,
    Links,
    Phase,
    Placed,
    Placement,
    Stretch,
    allreduce_terms,
    phases,
)
from pydtnn.perfmodel.formulas.table import ALGORITHMS, NONE, Terms, library_terms, terms_of

__all__ = [
    "ALGORITHMS",
    "NONE",
    "PLAIN",
    "Links",
    "Phase",
    "Placed",
    "Placement",
    "Stretch",
    "Terms",
    "allreduce_terms",
    "library_terms",
    "phases",
    "terms_of",
]
