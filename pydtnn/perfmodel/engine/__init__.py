"""Discrete-event simulation of ranks that are threads, and of their messages."""

from pydtnn.perfmodel.engine.engine import Engine
from pydtnn.perfmodel.engine.state import Completion

__all__ = ["Completion", "Engine"]
