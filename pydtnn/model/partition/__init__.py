"""Partition of a network over the ranks of a mesh: plans, layouts, and the pass over the graph."""

from pydtnn.model.partition.draft import Draft, PlanError
from pydtnn.model.partition.plan import Plan

__all__ = ["Draft", "Plan", "PlanError"]
