"""What both interfaces of cuDNN need to convolve."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.cudnn import Cudnn, Handle
from pydtnn.kernels.cuda.memory import Scratch
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import Elementwise

TYPES = ("float32", "float16", "bfloat16")
"""For float64 cuDNN has few algorithms, none of them for NHWC: im2row and cuBLAS have them."""


class CudnnEngine:
    """Convolutions on the current stream, with plans that are kept.

    Parameters
    ----------
    cudnn : Cudnn
    cupy : module
    handle : Handle
    elementwise : Elementwise
    scratch : Scratch
    tf32 : bool
        Whether float32 may be rounded to TF32 before it is multiplied.
    """

    def __init__(
        self,
        cudnn: Cudnn,
        cupy: Any,
        handle: Handle,
        elementwise: Elementwise,
        scratch: Scratch,
        *,
        tf32: bool,
    ) -> None:
        self._cudnn, self._cupy, self._handle, self._tf32 = cudnn, cupy, handle, tf32
        self._elementwise, self._scratch = elementwise, scratch
        self._plans: dict[Any, Any] = {}

    @staticmethod
    def suits(geometry: ConvGeometry, batch: int, dtype: str) -> bool:
        """Whether cuDNN may be asked at all."""
        return dtype in TYPES and batch > 0 and len(geometry.size) <= 3
