"""Layers and the blocks that compose them."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.layers.activation import (
        ELU,
        GELU,
        Activation,
        ArcTan,
        HardSigmoid,
        HardSwish,
        LeakyReLU,
        Log,
        LogSoftmax,
        ReLU,
        ReLU6,
        Sigmoid,
        SiLU,
        Softmax,
        Softplus,
        Tanh,
    )
    from pydtnn.layers.attention import DotProductAttention, MultiHeadAttention
    from pydtnn.layers.base import Cost, Layer, StepContext
    from pydtnn.layers.blocks import Block, Branches, Net, Residual, Sequential
    from pydtnn.layers.communicating import Communicating
    from pydtnn.layers.conv import Conv2d
    from pydtnn.layers.conv_transpose import ConvTranspose2d
    from pydtnn.layers.dropout import Dropout
    from pydtnn.layers.embedding import Embedding
    from pydtnn.layers.experts import Experts, MixtureOfExperts
    from pydtnn.layers.linear import Linear
    from pydtnn.layers.merge import Add, Concat, Multiply
    from pydtnn.layers.norm import BatchNorm, GroupNorm, LayerNorm, LocalResponseNorm, RMSNorm
    from pydtnn.layers.pool import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, MaxPool2d
    from pydtnn.layers.recurrent import GRU, LSTM, GRULayer, LSTMLayer
    from pydtnn.layers.rescale import Rescale
    from pydtnn.layers.reshape import Flatten, Identity, Pad, Reshape, Slice, Transpose
    from pydtnn.layers.rotary import Rotary
    from pydtnn.layers.sequence import ClassToken, PositionalEmbedding
    from pydtnn.layers.signal import AvgPool1d, Conv1d, GlobalAvgPool1d, MaxPool1d
    from pydtnn.layers.upsample import Upsample
    from pydtnn.layers.volume import AvgPool3d, Conv3d, GlobalAvgPool3d, MaxPool3d

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "GRULayer",
    "LSTM",
    "LSTMLayer",
    "Activation",
    "AdaptiveAvgPool2d",
    "Add",
    "ArcTan",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm",
    "Block",
    "Branches",
    "ClassToken",
    "Communicating",
    "Concat",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Cost",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "Experts",
    "Flatten",
    "GlobalAvgPool1d",
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
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MultiHeadAttention",
    "MaxPool3d",
    "MixtureOfExperts",
    "Multiply",
    "Net",
    "Pad",
    "PositionalEmbedding",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "Rescale",
    "Reshape",
    "Residual",
    "Rotary",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Softplus",
    "StepContext",
    "Tanh",
    "Transpose",
    "Upsample",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
