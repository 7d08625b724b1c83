"""The time of the parts of a step that are not communication."""

from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.compute.base import ComputeCosts, Label

__all__ = ["AnalyticCosts", "ComputeCosts", "Label"]
