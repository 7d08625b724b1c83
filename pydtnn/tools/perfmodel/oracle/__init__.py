"""The oracle: all strategies for a network on a platform, ranked and explained."""

from pydtnn.tools.perfmodel.oracle.ranking import KINDS, Entry, Oracle, Variants, best, strategies
from pydtnn.tools.perfmodel.oracle.table import Limit, find_limits
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS, Sweep, sweep

__all__ = [
    "KINDS",
    "SWEEPS",
    "Entry",
    "Limit",
    "Oracle",
    "Sweep",
    "Variants",
    "best",
    "find_limits",
    "strategies",
    "sweep",
]
