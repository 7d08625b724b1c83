"""Matrix products by cuBLAS, on any arrays whose rows or columns are contiguous.

CuPy's own `matmul` copies what is strided, allocates, and knows nothing of accumulating; here one
function of cuBLAS serves all types, all transpositions and batches of products.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, byref, c_int, c_longlong, c_size_t, c_void_p
from typing import Any

from pydtnn.kernels.cuda.libraries import Library
from pydtnn.kernels.reference.family import Array

NO, YES = 0, 1
"""Whether cuBLAS transposes a matrix."""

KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""Types of elements (cudaDataType)."""

FLOAT32, TF32, FLOAT64 = 68, 77, 70
"""What is computed with (cublasComputeType_t): products of 16 bits are exact in float32."""

DEFAULT_ALGORITHM = -1
FULL_SUMS = 16
"""Math mode in which partial sums of 16-bit products stay float32."""

WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper; with it cuBLAS never allocates, so that it can be captured."""

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (POINTER(c_void_p),),
    "cublasDestroy_v2": (c_void_p,),
    "cublasSetStream_v2": (c_void_p, c_void_p),
    "cublasSetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    "cublasSetMathMode": (c_void_p, c_int),
    "cublasGemmStridedBatchedEx": (
        *(c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p),  # handle, op, op, m, n, k, alpha
        *(c_void_p, c_int, c_int, c_longlong) * 2,  # a and b: address, type, row, step of the batch
        *(c_void_p, c_void_p, c_int, c_int, c_longlong),  # beta; c
        *(c_int, c_int, c_int),  # batch, compute type, algorithm
    ),
}
"""Argument types of the functions we call; all of them return a status."""


class CublasError(RuntimeError):
    """A call that failed, with the reason in cuBLAS's own words."""


class Products:
    """Matrix products on the current stream, with one handle and a workspace for each stream.

    Parameters
    ----------
    library : Library
        cuBLAS.
    cupy : module
    tf32 : bool
        Whether float32 may be rounded to TF32 before it is multiplied.
    """

    def __init__(self, library: Library, cupy: Any, *, tf32: bool) -> None:
        self._cupy = cupy
        self._compute = {"float32": TF32 if tf32 else FLOAT32, "float64": FLOAT64}
        self._call = declared(library)
        self._workspaces: dict[int, Any] = {}
        self._stream: int | None = None
        self._handle = c_void_p()
        self._call["cublasCreate_v2"](byref(self._handle))
        destroy = self._call["cublasDestroy_v2"]
        # when the interpreter ends, the driver may have ended before
        weakref.finalize(self, destroy, self._handle).atexit = False
        self._call["cublasSetMathMode"](self._handle, FULL_SUMS)

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
        """Compute ``out = a b``, or add it to `out`.

        Parameters
        ----------
        a : Array, shape (..., M, K)
        b : Array, shape (..., K, N)
        out : Array, shape (..., M, N)
            With contiguous rows. All three have the same number of axes, two or three, and one
            type; the product of 16-bit matrices may also be of float32.
        accumulate : bool
        """
        (rows, columns), inner = out.shape[-2:], a.shape[-1]
        batch = len(out) if out.ndim == 3 else 1
        if not (batch and rows and columns):
            return
        self._to_current_stream()
        kind, kind_out = KINDS[a.dtype.name], KINDS[out.dtype.name]
        compute = self._compute.get(a.dtype.name, FLOAT32)
        scalars = _DOUBLES if compute == FLOAT64 else _FLOATS
        # cuBLAS counts columns first: what it sees is out' = b' a'
        (turn_b, row_b), (turn_a, row_a) = layout(b), layout(a)
        turned, row_out = layout(out)
        assert turned == NO, "rows of the output must be contiguous"
        self._call["cublasGemmStridedBatchedEx"](
            *(self._handle, turn_b, turn_a, columns, rows, inner, scalars[1]),
            *(b.data.ptr, kind, row_b, batch_step(b)),
            *(a.data.ptr, kind, row_a, batch_step(a)),
            *(scalars[accumulate], out.data.ptr, kind_out, row_out, batch_step(out)),
            *(batch, compute, DEFAULT_ALGORITHM),
        )

    def _to_current_stream(self) -> None:
        stream = self._cupy.cuda.get_current_stream().ptr
        if stream == self._stream:
            return
        if stream not in self._workspaces:
            # from no pool: it stays, whatever the allocator of the moment is for
            self._workspaces[stream] = self._cupy.cuda.Memory(WORKSPACE_BYTES)
        self._call["cublasSetStream_v2"](self._handle, stream)
        # after the stream, which resets it
        address = self._workspaces[stream].ptr
        self._call["cublasSetWorkspace_v2"](self._handle, address, WORKSPACE_BYTES)
        self._stream = stream


def declared(library: Library) -> dict[str, Any]:
    """Give the functions their prototypes; they raise `CublasError` when they fail."""
    functions = library.functions
    functions.cublasGetStatusName.restype = ctypes.c_char_p
    functions.cublasGetStatusName.argtypes = (c_int,)

    def check(status: int, function: Any, arguments: tuple[Any, ...]) -> int:
        if status:
            reason = functions.cublasGetStatusName(status).decode()
            raise CublasError(f"cuBLAS: {function.__name__} failed: {reason}.")
        return status

    call: dict[str, Any] = {}
    for name, arguments in PROTOTYPES.items():
        function: Any = functions[name]
        function.argtypes, function.restype, function.errcheck = arguments, c_int, check
        call[name] = function
    return call


def layout(matrix: Array) -> tuple[int, int]:
    """Whether cuBLAS must transpose a matrix, and the elements from one row to the next.

    From one column to the next, if it is transposed. Strides of an axis of length 1 mean nothing.

    Raises
    ------
    ValueError
        If neither rows nor columns are contiguous.
    """
    rows, columns = matrix.shape[-2:]
    down, along = (stride // matrix.itemsize for stride in matrix.strides[-2:])
    if along == 1 or columns == 1:
        row = down if rows > 1 else columns
        if row >= columns:
            return NO, max(row, 1)
    if down == 1 or rows == 1:
        column = along if columns > 1 else rows
        if column >= rows:
            return YES, max(column, 1)
    raise ValueError(
        f"matrix product: neither rows nor columns of an array of shape {matrix.shape} and "
        f"strides {matrix.strides} are contiguous; copy it."
    )


def batch_step(matrix: Array) -> int:
    """Elements from one matrix of a batch to the next; 0 where there is but one."""
    return matrix.strides[0] // matrix.itemsize if matrix.ndim == 3 else 0


# Addresses of 0 and 1 for alpha and beta, which cuBLAS reads on the host before it returns.
_FLOATS = tuple(byref(ctypes.c_float(number)) for number in (0, 1))
_DOUBLES = tuple(byref(ctypes.c_double(number)) for number in (0, 1))
