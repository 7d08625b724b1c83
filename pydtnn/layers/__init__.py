"""Layers and the blocks that compose them."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import homes, lazy

if TYPE_CHECKING:
    __all__: list[str]
    from pydtnn.layers.activation import ELU as ELU
    from pydtnn.layers.activation import GELU as GELU
    from pydtnn.layers.activation import Activation as Activation
    from pydtnn.layers.activation import ArcTan as ArcTan
    from pydtnn.layers.activation import HardSigmoid as HardSigmoid
    from pydtnn.layers.activation import HardSwish as HardSwish
    from pydtnn.layers.activation import LeakyReLU as LeakyReLU
    from pydtnn.layers.activation import Log as Log
    from pydtnn.layers.activation import LogSoftmax as LogSoftmax
    from pydtnn.layers.activation import ReLU as ReLU
    from pydtnn.layers.activation import ReLU6 as ReLU6
    from pydtnn.layers.activation import Sigmoid as Sigmoid
    from pydtnn.layers.activation import SiLU as SiLU
    from pydtnn.layers.activation import Softmax as Softmax
    from pydtnn.layers.activation import Softplus as Softplus
    from pydtnn.layers.activation import Tanh as Tanh
    from pydtnn.layers.attention import CrossAttention as CrossAttention
    from pydtnn.layers.attention import DotProductAttention as DotProductAttention
    from pydtnn.layers.attention import MultiHeadAttention as MultiHeadAttention
    from pydtnn.layers.attention import MultiHeadCrossAttention as MultiHeadCrossAttention
    from pydtnn.layers.base import Cost as Cost
    from pydtnn.layers.base import Layer as Layer
    from pydtnn.layers.base import StepContext as StepContext
    from pydtnn.layers.blocks import Block as Block
    from pydtnn.layers.blocks import Branches as Branches
    from pydtnn.layers.blocks import Net as Net
    from pydtnn.layers.blocks import Residual as Residual
    from pydtnn.layers.blocks import Sequential as Sequential
    from pydtnn.layers.communicating import Communicating as Communicating
    from pydtnn.layers.conv import Conv2d as Conv2d
    from pydtnn.layers.conv_transpose import ConvTranspose2d as ConvTranspose2d
    from pydtnn.layers.dropout import Dropout as Dropout
    from pydtnn.layers.embedding import Embedding as Embedding
    from pydtnn.layers.experts import Experts as Experts
    from pydtnn.layers.experts import MixtureOfExperts as MixtureOfExperts
    from pydtnn.layers.linear import Linear as Linear
    from pydtnn.layers.merge import Add as Add
    from pydtnn.layers.merge import Concat as Concat
    from pydtnn.layers.merge import Multiply as Multiply
    from pydtnn.layers.norm import BatchNorm as BatchNorm
    from pydtnn.layers.norm import GroupNorm as GroupNorm
    from pydtnn.layers.norm import LayerNorm as LayerNorm
    from pydtnn.layers.norm import LocalResponseNorm as LocalResponseNorm
    from pydtnn.layers.norm import RMSNorm as RMSNorm
    from pydtnn.layers.pool import AdaptiveAvgPool2d as AdaptiveAvgPool2d
    from pydtnn.layers.pool import AvgPool2d as AvgPool2d
    from pydtnn.layers.pool import GlobalAvgPool2d as GlobalAvgPool2d
    from pydtnn.layers.pool import MaxPool2d as MaxPool2d
    from pydtnn.layers.positions import LinearBiases as LinearBiases
    from pydtnn.layers.positions import RelativePositions as RelativePositions
    from pydtnn.layers.recurrent import GRU as GRU
    from pydtnn.layers.recurrent import LSTM as LSTM
    from pydtnn.layers.recurrent import GRULayer as GRULayer
    from pydtnn.layers.recurrent import LSTMLayer as LSTMLayer
    from pydtnn.layers.rescale import Rescale as Rescale
    from pydtnn.layers.reshape import Flatten as Flatten
    from pydtnn.layers.reshape import Identity as Identity
    from pydtnn.layers.reshape import Pad as Pad
    from pydtnn.layers.reshape import Reshape as Reshape
    from pydtnn.layers.reshape import Slice as Slice
    from pydtnn.layers.reshape import Transpose as Transpose
    from pydtnn.layers.rotary import Rotary as Rotary
    from pydtnn.layers.sequence import ClassToken as ClassToken
    from pydtnn.layers.sequence import PositionalEmbedding as PositionalEmbedding
    from pydtnn.layers.signal import AvgPool1d as AvgPool1d
    from pydtnn.layers.signal import Conv1d as Conv1d
    from pydtnn.layers.signal import GlobalAvgPool1d as GlobalAvgPool1d
    from pydtnn.layers.signal import MaxPool1d as MaxPool1d
    from pydtnn.layers.upsample import Upsample as Upsample
    from pydtnn.layers.volume import AvgPool3d as AvgPool3d
    from pydtnn.layers.volume import Conv3d as Conv3d
    from pydtnn.layers.volume import GlobalAvgPool3d as GlobalAvgPool3d
    from pydtnn.layers.volume import MaxPool3d as MaxPool3d

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
    __all__ = [*homes(__name__)]
