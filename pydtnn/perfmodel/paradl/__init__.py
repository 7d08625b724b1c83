"""ParaDL's oracle: its published formulas, what its tool has printed, and a corrected version."""

from pydtnn.perfmodel.paradl.case import STRATEGIES, Case, Projection
from pydtnn.perfmodel.paradl.corrected import CORRECTIONS
from pydtnn.perfmodel.paradl.layers import LayerList, LayerSize
from pydtnn.perfmodel.paradl.projection import FORMULAS, project, sweep
from pydtnn.perfmodel.paradl.text import read_network, read_platform, read_split

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
