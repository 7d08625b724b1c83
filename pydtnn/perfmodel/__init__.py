"""The performance model: how long a network's training takes on a platform, and why."""

from pydtnn.perfmodel.compute import ComputeCosts, Label
from pydtnn.perfmodel.platform import Platform

__all__ = ["ComputeCosts", "Label", "Platform"]
