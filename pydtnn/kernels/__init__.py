"""Kernels: forward and backward of every operation on plain arrays, per device."""

from pydtnn.kernels.backend import BACKENDS, Backend, create_backend, recycled, report
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.geometry import ConvGeometry, PoolGeometry

__all__ = [
    "BACKENDS",
    "Backend",
    "ConvGeometry",
    "Deferred",
    "PoolGeometry",
    "Term",
    "create_backend",
    "recycled",
    "report",
]
