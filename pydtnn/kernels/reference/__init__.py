"""The readable reference of every kernel, by family.

Each class is constructed with an array module ``xp`` and operates on its arrays. Inputs come first,
``out=`` last and by keyword; ``out`` is overwritten unless ``accumulate=True``, which adds to it. A
device's family inherits from the one here and overrides kernels; tests compare it with the
reference.
"""

from pydtnn.kernels.reference.attention import AttentionKernels
from pydtnn.kernels.reference.conv import ConvKernels
from pydtnn.kernels.reference.elementwise import ElementwiseKernels
from pydtnn.kernels.reference.fused import FusedKernels
from pydtnn.kernels.reference.linear import LinearKernels
from pydtnn.kernels.reference.loss import LossKernels
from pydtnn.kernels.reference.norm import NormKernels
from pydtnn.kernels.reference.pool import PoolKernels
from pydtnn.kernels.reference.random import RandomKernels
from pydtnn.kernels.reference.recurrent import RecurrentKernels
from pydtnn.kernels.reference.update import UpdateKernels

FAMILIES = {
    "linear": LinearKernels,
    "conv": ConvKernels,
    "pool": PoolKernels,
    "norm": NormKernels,
    "fused": FusedKernels,
    "elementwise": ElementwiseKernels,
    "loss": LossKernels,
    "update": UpdateKernels,
    "random": RandomKernels,
    "attention": AttentionKernels,
    "recurrent": RecurrentKernels,
}
"""Families by their attribute name on a `Backend`."""

__all__ = [
    "FAMILIES",
    "AttentionKernels",
    "ConvKernels",
    "ElementwiseKernels",
    "FusedKernels",
    "LinearKernels",
    "LossKernels",
    "NormKernels",
    "PoolKernels",
    "RandomKernels",
    "RecurrentKernels",
    "UpdateKernels",
]
