"""Distributed training: exchange of gradients, schemes, compression, reproducible sums."""

from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.option import option

__all__ = ["AllReduce", "GradientExchange", "option"]
