"""Functions of CuPy, by name, and how a function of NumPy becomes work of a stream.

The type and the shape of a result are known at once, its values when the work is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulated.cupy.array import DeviceArray

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy

COMPUTED = (
    *("abs", "absolute", "add", "all", "any", "arccos", "arccosh", "arcsin", "arcsinh", "arctan"),
    *("arctan2", "arctanh", "argmax", "argmin", "argsort", "around", "average", "bincount"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "cbrt", "ceil", "choose", "clip", "concatenate"),
    *("copysign", "cos", "cosh", "count_nonzero", "cumprod", "cumsum", "deg2rad", "diff"),
    *("divide", "divmod", "dot", "dstack", "einsum", "equal", "exp", "exp2", "expm1", "fabs"),
    *("flip", "floor", "floor_divide", "fmax", "fmin", "fmod", "frexp", "greater", "greater_equal"),
    *("hstack", "hypot", "inner", "invert", "isclose", "isfinite", "isinf", "isnan", "isneginf"),
    *("isposinf", "kron", "ldexp", "left_shift", "less", "less_equal", "lexsort", "linspace"),
    *("log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or"),
    *("logical_xor", "matmul", "max", "maximum", "mean", "median", "min", "minimum", "mod"),
    *("multiply", "nan_to_num", "negative", "nextafter", "not_equal", "outer", "packbits", "pad"),
    *("partition", "percentile", "positive", "power", "prod", "rad2deg", "reciprocal", "remainder"),
    *("repeat", "right_shift", "rint", "roll", "rot90", "round", "searchsorted", "sign", "signbit"),
    *("sin", "sinc", "sinh", "sort", "sqrt", "square", "stack", "std", "subtract", "sum"),
    *("take", "take_along_axis", "tan", "tanh", "tensordot", "tile", "trace", "tri", "tril"),
    *("triu", "true_divide", "trunc", "unpackbits", "var", "vdot", "vstack", "where"),
)
"""What becomes work."""

VIEWED = (
    *("array_split", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "diagonal"),
    *("dsplit", "expand_dims", "hsplit", "moveaxis", "ravel", "reshape", "rollaxis", "split"),
    *("squeeze", "swapaxes", "transpose", "vsplit"),
)
"""What needs no work, where the result is a part of the same memory."""

SHAPED_BY_VALUES = ("argwhere", "compress", "extract", "flatnonzero", "nonzero", "unique")
"""What must wait for the values to know the shape."""

KNOWN_AT_ONCE = ("can_cast", "iscomplexobj", "ndim", "result_type", "shape", "size")
"""What types and shapes are enough for."""

OF_THE_HOST = (
    *("broadcast_shapes", "dtype", "e", "euler_gamma", "finfo", "iinfo", "inf", "isscalar"),
    *("issubdtype", "nan", "newaxis", "pi", "promote_types"),
    *("bool_", "complex64", "complex128", "float16", "float32", "float64", "int8", "int16"),
    *("int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""What has nothing to do with arrays."""

PRODUCTS = ("dot", "einsum", "inner", "matmul", "tensordot", "vdot")
"""What calls cuBLAS, which CuPy refuses while a step is captured."""

JOINED = ("concatenate", "dstack", "hstack", "stack", "vstack")
MOST_JOINED = 8
"""Arrays that CuPy joins one by one; if there are more, it brings their addresses to the device."""


class Function:
    """What NumPy's function of a name computes, as work of the current stream."""

    def __init__(self, xp: SimulatedCupy, name: str) -> None:
        self.xp, self.name = xp, name
        self.numpy: Callable[..., Any] = getattr(np, name)

    def __call__(self, *args: Any, out: Any = None, **options: Any) -> Any:
        out = out[0] if isinstance(out, tuple) else out
        arrays = [*leaves((args, options)), *([] if out is None else [out])]
        refuse_others(self.xp, arrays)
        if self.name in PRODUCTS and self.xp.current.capture is not None:
            self.xp.current.forbid("cuBLAS cannot be called inside a capture")
        if self.name in JOINED and len(list(leaves(args))) > MOST_JOINED:
            self.xp.uploads("addresses of the arrays that are joined")
        values, given = swapped(args, memory_of), swapped(options, memory_of)

        def compute() -> Any:
            return self.numpy(*values, **given)

        with np.errstate(all="ignore"):
            at_once = self.xp.current.ready
            known = compute() if at_once else self._outline(args, options)
        results = self._results(known, out)
        blocks = [a.block for a in arrays]
        targets = [result.memory for result in results]
        several = isinstance(known, tuple | list)

        def assign(computed: Any) -> None:
            for target, value in zip(targets, computed if several else [computed], strict=True):
                target[...] = value

        if at_once:
            self.xp.put(lambda: assign(known), blocks)
        else:
            self.xp.put(lambda: assign(compute()), [*blocks, *(r.block for r in results)])
        return type(known)(results) if several else results[0]

    def _outline(self, args: Any, options: Any) -> Any:
        """Compute with zeros that take no memory: types and shapes are right."""
        return self.numpy(*swapped(args, outline_of), **swapped(options, outline_of))

    def _results(self, known: Any, out: DeviceArray | None) -> list[DeviceArray]:
        """Make the arrays that receive the results, or check the one that is given."""
        several = known if isinstance(known, tuple | list) else [known]
        if out is None:
            return [self.xp.empty(a.shape, a.dtype) for a in map(np.asarray, several)]
        [result] = map(np.asarray, several)
        if not np.can_cast(result.dtype, out.dtype, "same_kind"):
            raise TypeError(f"{self.name}: {result.dtype} cannot be cast to {out.dtype}")
        fit(result.shape, out.shape)
        return [out]


def viewed(xp: SimulatedCupy, name: str) -> Callable[..., Any]:
    """Make a function that views the same memory, and computes where NumPy would copy."""
    function: Callable[..., Any] = getattr(np, name)

    def view(array: DeviceArray, *args: Any, **options: Any) -> Any:
        refuse_others(xp, [array])
        result = function(array.memory, *args, **options)
        if isinstance(result, tuple | list):
            return type(result)(array.viewing(part) for part in result)
        if array.size and not np.may_share_memory(result, array.memory):
            return Function(xp, name)(array, *args, **options)
        return array.viewing(result)

    return view


def known_at_once(xp: SimulatedCupy, name: str) -> Callable[..., Any]:
    """Make a function that does not read its arguments' values."""
    function: Callable[..., Any] = getattr(np, name)
    return lambda *args, **options: function(*swapped(args, outline_of), **options)


def shaped_by_values(xp: SimulatedCupy, name: str) -> Callable[..., Any]:
    """Make a function that waits for its arguments' values."""

    def wait(*args: Any, **options: Any) -> Any:
        refuse_others(xp, list(leaves((args, options))))
        result = getattr(np, name)(*swapped(args, DeviceArray.get), **options)
        return tuple(map(xp.asarray, result)) if isinstance(result, tuple) else xp.asarray(result)

    return wait


def fit(shape: tuple[int, ...], into: tuple[int, ...]) -> None:
    """Raise ValueError if values of a shape cannot be assigned to another."""
    while len(shape) > len(into) and shape[0] == 1:
        shape = shape[1:]
    if np.broadcast_shapes(shape, into) != into:
        raise ValueError(f"could not broadcast values of shape {shape} into {into}")


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the arrays in nested arguments, of the device and of the host."""
    if isinstance(tree, DeviceArray | np.ndarray):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)


def swapped(tree: Any, convert: Callable[[DeviceArray], Any]) -> Any:
    """Replace the arrays in nested arguments."""
    if isinstance(tree, DeviceArray):
        return convert(tree)
    if isinstance(tree, dict):
        return {name: swapped(value, convert) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(swapped(value, convert) for value in tree)
    return tree


def refuse_others(xp: SimulatedCupy, arrays: list[Any]) -> None:
    """Let only arrays of this device pass, as CuPy does."""
    for array in arrays:
        if not isinstance(array, DeviceArray):
            raise TypeError(f"Unsupported type {type(array)}")
        if array.xp is not xp:
            raise TypeError("an array of another device")


def memory_of(array: DeviceArray) -> np.ndarray:
    return array.memory


def outline_of(array: DeviceArray) -> np.ndarray:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)
