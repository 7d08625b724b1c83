"""Discrete-event simulation of ranks that are threads, and of their messages."""

from pydtnn.tools.perfmodel.engine.engine import Completion, Engine

__all__ = ["Completion", "Engine"]
