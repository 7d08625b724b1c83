"""cuDNN 9 through ctypes: its functions, and the older of its two interfaces.

We use its convolutions alone. Its pooling has another contract than ours (no index of the maximum,
no uneven padding), and what batch norm does is part of our own fused kernels.

NVIDIA calls this interface deprecated, in favour of one in which graphs of operations are built
(`cudnn_graph.py`). It is complete, though, and has algorithms that are the fastest for some
geometries: which one is, is measured.

References
----------
NVIDIA, "cuDNN API reference", libraries cudnn_ops and cudnn_cnn.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

from pydtnn.kernels.cuda.libraries import Library
from pydtnn.kernels.geometry import ConvGeometry

NHWC = 1
CROSS_CORRELATION = 1
DETERMINISTIC = 1
SUCCESS, NOT_SUPPORTED = 0, 3000  # 3001, 3002, ... say why

DEFAULT_MATH, TENSOR_OP_MATH, CONVERSION_MATH, FMA_MATH = range(4)
"""What a convolution may compute with. For float32, the first allows TF32 and the last nothing but
float32; the third rounds float32 to 16 bits."""

DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}

_INTS = POINTER(c_int)


class Performance(ctypes.Structure):
    """What cuDNN expects of one algorithm (cudnnConvolution*AlgoPerf_t)."""

    _fields_ = (
        ("algorithm", c_int),
        ("status", c_int),
        ("milliseconds", c_float),
        ("memory", c_size_t),
        ("determinism", c_int),
        ("math", c_int),
        ("reserved", c_int * 3),
    )


_EXPECT = (*(c_void_p,) * 5, c_int, _INTS, POINTER(Performance))
_WORKSPACE = (*(c_void_p,) * 5, c_int, POINTER(c_size_t))
_CONVOLVE = (
    *(c_void_p, c_void_p),  # handle, alpha
    *(c_void_p, c_void_p) * 2,  # two inputs, each a descriptor and an address
    *(c_void_p, c_int, c_void_p, c_size_t),  # convolution, algorithm, workspace
    *(c_void_p, c_void_p, c_void_p),  # beta, the output's descriptor and address
)
_CREATE, _DESTROY = (POINTER(c_void_p),), (c_void_p,)

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": _CREATE,
    "cudnnDestroy": _DESTROY,
    "cudnnSetStream": (c_void_p, c_void_p),
    "cudnnCreateTensorDescriptor": _CREATE,
    "cudnnDestroyTensorDescriptor": _DESTROY,
    "cudnnSetTensorNdDescriptorEx": (c_void_p, c_int, c_int, c_int, _INTS),
    "cudnnCreateFilterDescriptor": _CREATE,
    "cudnnDestroyFilterDescriptor": _DESTROY,
    "cudnnSetFilterNdDescriptor": (c_void_p, c_int, c_int, c_int, _INTS),
    "cudnnCreateConvolutionDescriptor": _CREATE,
    "cudnnDestroyConvolutionDescriptor": _DESTROY,
    "cudnnSetConvolutionNdDescriptor": (c_void_p, c_int, _INTS, _INTS, _INTS, c_int, c_int),
    "cudnnSetConvolutionGroupCount": (c_void_p, c_int),
    "cudnnSetConvolutionMathType": (c_void_p, c_int),
    "cudnnGetConvolutionNdForwardOutputDim": (c_void_p, c_void_p, c_void_p, c_int, _INTS),
    "cudnnGetConvolutionForwardAlgorithm_v7": _EXPECT,
    "cudnnGetConvolutionBackwardDataAlgorithm_v7": _EXPECT,
    "cudnnGetConvolutionBackwardFilterAlgorithm_v7": _EXPECT,
    "cudnnGetConvolutionForwardWorkspaceSize": _WORKSPACE,
    "cudnnGetConvolutionBackwardDataWorkspaceSize": _WORKSPACE,
    "cudnnGetConvolutionBackwardFilterWorkspaceSize": _WORKSPACE,
    "cudnnConvolutionForward": _CONVOLVE,
    "cudnnConvolutionBackwardData": _CONVOLVE,
    "cudnnConvolutionBackwardFilter": _CONVOLVE,
    "cudnnBackendCreateDescriptor": (c_int, POINTER(c_void_p)),
    "cudnnBackendDestroyDescriptor": _DESTROY,
    "cudnnBackendSetAttribute": (c_void_p, c_int, c_int, c_int64, c_void_p),
    "cudnnBackendGetAttribute": (c_void_p, c_int, c_int, c_int64, POINTER(c_int64), c_void_p),
    "cudnnBackendFinalize": _DESTROY,
    "cudnnBackendExecute": (c_void_p, c_void_p, c_void_p),
}
"""Argument types of the functions we call; all of them return a status."""


class CudnnError(RuntimeError):
    """A call that failed, with the reason in cuDNN's own words.

    Parameters
    ----------
    function : str
    status : int
    reason : str
    """

    def __init__(self, function: str, status: int, reason: str) -> None:
        super().__init__(f"cuDNN: {function} failed: {reason}.")
        self.status = status

    @property
    def unsupported(self) -> bool:
        """Whether cuDNN merely has nothing for what was asked."""
        return NOT_SUPPORTED <= self.status < NOT_SUPPORTED + 1000


class Direction(NamedTuple):
    """Functions and deterministic algorithms of one direction of a convolution.

    All three take two inputs and write one output: y of x and w, dx of w and dy, dw of x and dy.
    """

    convolve: str
    workspace: str
    expect: str
    algorithms: dict[int, str]


DIRECTIONS = {
    "forward": Direction(
        "cudnnConvolutionForward",
        "cudnnGetConvolutionForwardWorkspaceSize",
        "cudnnGetConvolutionForwardAlgorithm_v7",
        {
            0: "implicit gemm",
            1: "precomputed gemm",
            2: "gemm",
            4: "fft",
            5: "tiled fft",
            6: "winograd",
            7: "separate winograd",
        },
    ),
    "backward_data": Direction(
        "cudnnConvolutionBackwardData",
        "cudnnGetConvolutionBackwardDataWorkspaceSize",
        "cudnnGetConvolutionBackwardDataAlgorithm_v7",
        {1: "gemm", 2: "fft", 3: "tiled fft", 4: "winograd", 5: "separate winograd"},
    ),
    "backward_filter": Direction(
        "cudnnConvolutionBackwardFilter",
        "cudnnGetConvolutionBackwardFilterWorkspaceSize",
        "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
        {1: "gemm", 2: "fft", 5: "separate winograd", 6: "tiled fft"},
    ),
}
"""What is left out adds floats atomically, in an order that changes from run to run."""


class Cudnn:
    """The functions of a loaded cuDNN, with prototypes; they raise `CudnnError` when they fail.

    Parameters
    ----------
    library : Library
    """

    def __init__(self, library: Library) -> None:
        functions = library.functions
        functions.cudnnGetErrorString.restype = ctypes.c_char_p
        functions.cudnnGetLastErrorString.argtypes = (ctypes.c_char_p, c_size_t)
        functions.cudnnGetLastErrorString.restype = None
        self.library = library
        self.call: dict[str, Callable[..., int]] = {}
        for name, arguments in PROTOTYPES.items():
            function: Any = functions[name]
            function.argtypes, function.restype = arguments, c_int
            function.errcheck = self._check
            self.call[name] = function

    def _check(self, status: int, function: Any, arguments: tuple[Any, ...]) -> int:
        if status != SUCCESS:
            functions = self.library.functions
            reason = functions.cudnnGetErrorString(status).decode()
            message = ctypes.create_string_buffer(512)
            functions.cudnnGetLastErrorString(message, len(message))
            if detail := " ".join(message.value.decode(errors="replace").split()).rstrip("."):
                reason += f" ({detail})"
            raise CudnnError(function.__name__, status, reason)
        return status

    def create(self, kind: str) -> Descriptor:
        """Make a handle ("") or a descriptor ("TensorDescriptor" and so on)."""
        return Descriptor(self.call[f"cudnnCreate{kind}"], self.call[f"cudnnDestroy{kind}"])

    def tensor(self, batch: int, size: Sequence[int], channels: int, dtype: str) -> Descriptor:
        """Describe a contiguous array ``(batch, *size, channels)``."""
        descriptor = self.create("TensorDescriptor")
        dims = ints((batch, channels, *two_axes(size, 1)))  # in this order for every layout
        self.call["cudnnSetTensorNdDescriptorEx"](
            descriptor, NHWC, DATA_TYPES[dtype], len(dims), dims
        )
        return descriptor

    def filters(self, geometry: ConvGeometry, dtype: str) -> Descriptor:
        """Describe contiguous filters ``(filters, *kernel, channels // groups)``."""
        descriptor = self.create("FilterDescriptor")
        inputs = geometry.channels // geometry.groups
        dims = ints((geometry.filters, inputs, *two_axes(geometry.kernel, 1)))
        self.call["cudnnSetFilterNdDescriptor"](
            descriptor, DATA_TYPES[dtype], NHWC, len(dims), dims
        )
        return descriptor

    def convolution(self, geometry: ConvGeometry, dtype: str) -> Descriptor:
        """Describe strides, dilations, groups and the padding, which must be even."""
        assert all(before == after for before, after in geometry.padding)
        descriptor = self.create("ConvolutionDescriptor")
        padding = ints(two_axes([before for before, _ in geometry.padding], 0))
        stride, dilation = ints(two_axes(geometry.stride, 1)), ints(two_axes(geometry.dilation, 1))
        compute = DATA_TYPES["float64" if dtype == "float64" else "float32"]
        self.call["cudnnSetConvolutionNdDescriptor"](
            descriptor, len(padding), padding, stride, dilation, CROSS_CORRELATION, compute
        )
        self.call["cudnnSetConvolutionGroupCount"](descriptor, geometry.groups)
        return descriptor

    def output_shape(
        self, convolution: Descriptor, x: Descriptor, w: Descriptor, axes: int
    ) -> tuple[int, ...]:
        """Shape ``(N, O, *output)`` that cuDNN computes, with `axes` of them in all."""
        dims = (c_int * axes)()
        self.call["cudnnGetConvolutionNdForwardOutputDim"](convolution, x, w, axes, dims)
        return tuple(dims)


class Descriptor:
    """An opaque object of cuDNN's, destroyed with the last reference to this one."""

    def __init__(self, create: Callable[..., int], destroy: Callable[..., int]) -> None:
        pointer = c_void_p()
        create(byref(pointer))
        self._as_parameter_ = pointer  # what ctypes passes on
        # when the interpreter ends, the driver may have ended before
        weakref.finalize(self, destroy, pointer).atexit = False


class Handle:
    """cuDNN for one GPU, on the stream that is current when it is asked for.

    Parameters
    ----------
    cudnn : Cudnn
    cupy : module

    Attributes
    ----------
    pointer : c_void_p
    """

    def __init__(self, cudnn: Cudnn, cupy: Any) -> None:
        self._cudnn, self._cupy = cudnn, cupy
        self._descriptor = cudnn.create("")
        self.pointer = self._as_parameter_ = self._descriptor._as_parameter_
        self._stream: int | None = None

    def to_current_stream(self) -> None:
        """Let what is called next go to CuPy's current stream."""
        stream = self._cupy.cuda.get_current_stream().ptr
        if stream != self._stream:
            self._cudnn.call["cudnnSetStream"](self, c_void_p(stream))
            self._stream = stream


def ints(values: Sequence[int]) -> Any:
    """Make a C array."""
    return (c_int * len(values))(*values)


def two_axes(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Put an axis before a single one: cuDNN has no convolutions of one axis."""
    return (fill,) * (2 - len(values)) + tuple(values)
