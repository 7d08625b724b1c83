"""The time of the parts of a step that are not communication."""

from pydtnn.perfmodel.compute.base import ComputeCosts, Label

__all__ = ["ComputeCosts", "Label"]
