"""Kernels: forward and backward of every operation on plain arrays, per device."""

from pydtnn.kernels.backend import BACKENDS, Backend, create_backend, report
from pydtnn.kernels.geometry import ConvGeometry, PoolGeometry

__all__ = ["BACKENDS", "Backend", "ConvGeometry", "PoolGeometry", "create_backend", "report"]
