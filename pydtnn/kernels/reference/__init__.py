"""The readable reference of every kernel, by family.

Each class is constructed with an array module ``xp`` and operates on its arrays. Inputs come first,
``out=`` last and by keyword; ``out`` is overwritten unless ``accumulate=True``, which adds to it. A
device's family inherits from the one here and overrides kernels; tests compare it with the
reference.
"""

from pydtnn.kernels.reference.attention import Attention
from pydtnn.kernels.reference.conv import Conv
from pydtnn.kernels.reference.elementwise import Elementwise
from pydtnn.kernels.reference.fused import Fused
from pydtnn.kernels.reference.linear import Linear
from pydtnn.kernels.reference.loss import Loss
from pydtnn.kernels.reference.norm import Norm
from pydtnn.kernels.reference.pool import Pool
from pydtnn.kernels.reference.random import Random
from pydtnn.kernels.reference.recurrent import Recurrent
from pydtnn.kernels.reference.update import Update

FAMILIES = {
    "linear": Linear,
    "conv": Conv,
    "pool": Pool,
    "norm": Norm,
    "fused": Fused,
    "elementwise": Elementwise,
    "loss": Loss,
    "update": Update,
    "random": Random,
    "attention": Attention,
    "recurrent": Recurrent,
}
"""Families by their attribute name on a `Backend`."""

__all__ = [
    "FAMILIES",
    "Attention",
    "Conv",
    "Elementwise",
    "Fused",
    "Linear",
    "Loss",
    "Norm",
    "Pool",
    "Random",
    "Recurrent",
    "Update",
]
