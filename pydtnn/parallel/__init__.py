"""Distributed training: meshes of ranks, exchange of gradients, schemes, compression, sums."""

from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.option import option

__all__ = ["AllReduce", "GradientExchange", "Mesh", "option"]
