"""Descriptors of cuDNN's graphs: objects of some kind with attributes of some type.

All are made alike: created, given their attributes by number, and finalized, upon which cuDNN
checks them. The numbers are those of the header cudnn_graph.h, to which the tests compare them.

References
----------
NVIDIA, "cuDNN backend API reference", library cudnn_graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from ctypes import byref, c_bool, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

from pydtnn.kernels.cuda.cudnn import Cudnn

KINDS = {
    "POINTWISE": 0,
    "CONVOLUTION": 1,
    "ENGINE": 2,
    "ENGINECFG": 3,
    "ENGINEHEUR": 4,
    "EXECUTION_PLAN": 5,
    "OPERATION_CONVOLUTION_FORWARD": 10,
    "OPERATION_CONVOLUTION_BACKWARD_FILTER": 11,
    "OPERATION_CONVOLUTION_BACKWARD_DATA": 12,
    "OPERATION_POINTWISE": 13,
    "OPERATION_GEN_STATS": 14,
    "OPERATIONGRAPH": 15,
    "VARIANT_PACK": 16,
    "TENSOR": 17,
}
"""Descriptors that we use (CUDNN_BACKEND_*_DESCRIPTOR)."""


class Type(NamedTuple):
    """Type of an attribute (CUDNN_TYPE_*): cuDNN's number, and what its elements are in C."""

    number: int
    element: Any


HANDLE, DATA_TYPE, BOOLEAN = Type(0, c_void_p), Type(1, c_int), Type(2, c_bool)
INT64, FLOAT, VOID_PTR = Type(3, c_int64), Type(4, c_float), Type(6, c_void_p)
CONVOLUTION_MODE, HEUR_MODE, NUMERICAL_NOTE = Type(7, c_int), Type(8, c_int), Type(11, c_int)
POINTWISE_MODE, DESCRIPTOR, GENSTATS_MODE = Type(14, c_int), Type(15, c_void_p), Type(16, c_int)

ATTRIBUTES = {
    "POINTWISE_MODE": (0, POINTWISE_MODE),
    "POINTWISE_MATH_PREC": (1, DATA_TYPE),
    "CONVOLUTION_COMP_TYPE": (100, DATA_TYPE),
    "CONVOLUTION_CONV_MODE": (101, CONVOLUTION_MODE),
    "CONVOLUTION_DILATIONS": (102, INT64),
    "CONVOLUTION_FILTER_STRIDES": (103, INT64),
    "CONVOLUTION_POST_PADDINGS": (104, INT64),
    "CONVOLUTION_PRE_PADDINGS": (105, INT64),
    "CONVOLUTION_SPATIAL_DIMS": (106, INT64),
    "ENGINEHEUR_MODE": (200, HEUR_MODE),
    "ENGINEHEUR_OPERATION_GRAPH": (201, DESCRIPTOR),
    "ENGINEHEUR_RESULTS": (202, DESCRIPTOR),
    "ENGINECFG_ENGINE": (300, DESCRIPTOR),
    "EXECUTION_PLAN_HANDLE": (400, HANDLE),
    "EXECUTION_PLAN_ENGINE_CONFIG": (401, DESCRIPTOR),
    "EXECUTION_PLAN_WORKSPACE_SIZE": (402, INT64),
    "OPERATION_CONVOLUTION_FORWARD_ALPHA": (700, FLOAT),
    "OPERATION_CONVOLUTION_FORWARD_BETA": (701, FLOAT),
    "OPERATION_CONVOLUTION_FORWARD_CONV_DESC": (702, DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_W": (703, DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_X": (704, DESCRIPTOR),
    "OPERATION_CONVOLUTION_FORWARD_Y": (705, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_ALPHA": (706, FLOAT),
    "OPERATION_CONVOLUTION_BWD_DATA_BETA": (707, FLOAT),
    "OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC": (708, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_W": (709, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_DX": (710, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_DATA_DY": (711, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_ALPHA": (712, FLOAT),
    "OPERATION_CONVOLUTION_BWD_FILTER_BETA": (713, FLOAT),
    "OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC": (714, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_DW": (715, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_X": (716, DESCRIPTOR),
    "OPERATION_CONVOLUTION_BWD_FILTER_DY": (717, DESCRIPTOR),
    "OPERATION_POINTWISE_PW_DESCRIPTOR": (750, DESCRIPTOR),
    "OPERATION_POINTWISE_XDESC": (751, DESCRIPTOR),
    "OPERATION_POINTWISE_BDESC": (752, DESCRIPTOR),
    "OPERATION_POINTWISE_YDESC": (753, DESCRIPTOR),
    "OPERATION_GENSTATS_MODE": (770, GENSTATS_MODE),
    "OPERATION_GENSTATS_MATH_PREC": (771, DATA_TYPE),
    "OPERATION_GENSTATS_XDESC": (772, DESCRIPTOR),
    "OPERATION_GENSTATS_SUMDESC": (773, DESCRIPTOR),
    "OPERATION_GENSTATS_SQSUMDESC": (774, DESCRIPTOR),
    "OPERATIONGRAPH_HANDLE": (800, HANDLE),
    "OPERATIONGRAPH_OPS": (801, DESCRIPTOR),
    "TENSOR_BYTE_ALIGNMENT": (900, INT64),
    "TENSOR_DATA_TYPE": (901, DATA_TYPE),
    "TENSOR_DIMENSIONS": (902, INT64),
    "TENSOR_STRIDES": (903, INT64),
    "TENSOR_UNIQUE_ID": (906, INT64),
    "TENSOR_IS_VIRTUAL": (907, BOOLEAN),
    "VARIANT_PACK_UNIQUE_IDS": (1000, INT64),
    "VARIANT_PACK_DATA_POINTERS": (1001, VOID_PTR),
    "VARIANT_PACK_WORKSPACE": (1003, VOID_PTR),
    "ENGINE_NUMERICAL_NOTE": (1303, NUMERICAL_NOTE),
}
"""Attributes that we set or get (CUDNN_ATTR_*), with their types."""


class Node:
    """A descriptor, finalized; destroyed with the last reference to it.

    Parameters
    ----------
    cudnn : Cudnn
    kind : str
        One of `KINDS`.
    attributes : mapping, optional
        By the names of `ATTRIBUTES`: a value, or a sequence of values. Without any, the descriptor
        is left empty, to be filled in by `get` of another one.
    """

    def __init__(
        self, cudnn: Cudnn, kind: str, attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._cudnn = cudnn
        self._parts = attributes  # alive as long as what was made of them
        self.pointer = c_void_p()
        cudnn.call["cudnnBackendCreateDescriptor"](KINDS[kind], byref(self.pointer))
        destroy = cudnn.call["cudnnBackendDestroyDescriptor"]
        # when the interpreter ends, the driver may have ended before
        weakref.finalize(self, destroy, self.pointer).atexit = False
        if attributes:
            for name, value in attributes.items():
                self._set(name, value)
            cudnn.call["cudnnBackendFinalize"](self.pointer)

    def _set(self, name: str, value: Any) -> None:
        number, kind = ATTRIBUTES[name]
        values = value if isinstance(value, (list, tuple, bytes)) else [value]
        elements = [v.pointer if isinstance(v, Node) else v for v in values]
        array = (kind.element * len(elements))(*elements)
        self._cudnn.call["cudnnBackendSetAttribute"](
            self.pointer, number, kind.number, len(elements), array
        )

    def get(self, name: str, most: int, of: str = "") -> list[Any]:
        """Return the values of an attribute, so many at most; descriptors of the kind `of`."""
        number, kind = ATTRIBUTES[name]
        count, nodes = c_int64(), [Node(self._cudnn, of) for _ in range(most if of else 0)]
        array = (kind.element * most)(*(node.pointer for node in nodes))
        self._cudnn.call["cudnnBackendGetAttribute"](
            self.pointer, number, kind.number, most, byref(count), array
        )
        return (nodes or list(array))[: count.value]
