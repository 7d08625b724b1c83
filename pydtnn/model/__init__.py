"""A network on a device: its graph, the two loops that run it, and what is known beforehand."""

from pydtnn.model.model import Model

__all__ = ["Model"]
