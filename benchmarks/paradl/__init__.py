"""ParaDL's oracle: its published formulas, what its tool has printed, and a corrected version."""

from benchmarks.paradl.case import STRATEGIES, Case, Projection
from benchmarks.paradl.corrected import CORRECTIONS
from benchmarks.paradl.layers import LayerList, LayerSize
from benchmarks.paradl.projection import FORMULAS, project, sweep
from benchmarks.paradl.text import read_network, read_platform, read_split

__all__ = [
    "CORRECTIONS",
    "FORMULAS",
    "STRATEGIES",
    "Case",
    "LayerList",
    "LayerSize",
    "Projection",
    "project",
    "read_network",
    "read_platform",
    "read_split",
    "sweep",
]
