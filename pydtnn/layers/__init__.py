"""Layers and the blocks that compose them."""

from typing import TYPE_CHECKING

from pydtnn.layers.activation import (
    ELU,
    GELU,
    Activation,
    ArcTan,
    HardSigmoid,
    HardSwish,
    LeakyReLU,
    Log,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from pydtnn.layers.attention import DotProductAttention, MultiHeadAttention
from pydtnn.layers.base import Cost, Layer, StepContext
from pydtnn.layers.blocks import Block, Branches, Net, Residual, Sequential
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.conv_transpose import ConvTranspose2d
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.embedding import Embedding
from pydtnn.layers.linear import Linear
from pydtnn.layers.local_response import LocalResponseNorm
from pydtnn.layers.merge import Add, Concat, Multiply
from pydtnn.layers.norm import BatchNorm, GroupNorm, LayerNorm
from pydtnn.layers.pool import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, MaxPool2d
from pydtnn.layers.rescale import Rescale
from pydtnn.layers.reshape import Flatten, Identity, Pad, Reshape, Slice, Transpose
from pydtnn.layers.sequence import ClassToken, PositionalEmbedding
from pydtnn.layers.upsample import Upsample
from pydtnn.layers.volume import AvgPool3d, Conv3d, GlobalAvgPool3d, MaxPool3d
from pydtnn.utils.foreign_names import aliases_of, suggesting_getattr

__all__ = [
    "ELU",
    "GELU",
    "Activation",
    "AdaptiveAvgPool2d",
    "Add",
    "ArcTan",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm",
    "Block",
    "Branches",
    "ClassToken",
    "Concat",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Cost",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2d",
    "GlobalAvgPool3d",
    "GroupNorm",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LocalResponseNorm",
    "Log",
    "MaxPool2d",
    "MultiHeadAttention",
    "MaxPool3d",
    "Multiply",
    "Net",
    "Pad",
    "PositionalEmbedding",
    "ReLU",
    "ReLU6",
    "Rescale",
    "Reshape",
    "Residual",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Slice",
    "Softmax",
    "StepContext",
    "Tanh",
    "Transpose",
    "Upsample",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = suggesting_getattr(__name__)
    __all__ += aliases_of(__name__)  # `from package import *` reads no other names
