"""A network on a device: its graph, forward and backward loops, fusion, and memory estimates."""

from pydtnn.model.generation import generate
from pydtnn.model.model import Model

__all__ = ["Model", "generate"]
