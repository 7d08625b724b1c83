"""The data of one rank in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.order import Shard
from pydtnn.data.prepare import Prepare
from pydtnn.utils.validate import plain_array

if TYPE_CHECKING:
    from pydtnn.kernels.backend import Backend

Array = NDArray[Any]

Shape = tuple[int, ...]


def parts(value: Any) -> tuple[Any, ...]:
    """Return one object, or a tuple of several, as a tuple.

    >>> parts(1), parts((1, 2))
    ((1,), (1, 2))
    """
    return value if isinstance(value, tuple) else (value,)


def each(call: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Call a function with an object, or with each of several; return one result, or a tuple.

    Others are sequences, which have an object for each of the first ones.

    >>> each(abs, -1), each(abs, (-1, -2)), each(pow, 2, [3])
    (1, (1, 2), 8)
    """
    made = tuple(call(*values) for values in zip(parts(first), *others, strict=True))
    return made if isinstance(first, tuple) else made[0]


def plain_parts(who: str, name: str, value: Any) -> Any:
    """Return one array, or a tuple of arrays if that is what is given; see `plain_array`."""
    plain = partial(plain_array, who, name)
    several = isinstance(value, tuple) and value and all(np.ndim(part) > 0 for part in value)
    return each(plain, value) if several else plain(value)


def each_names(call: Callable[[tuple[str, ...]], Any], class_names: Any) -> Any:
    """Call a function with the names of classes of one target, or of each of several.

    >>> each_names(len, ("cat", "dog")), each_names(len, (("cat", "dog"), None))
    (2, (2, None))
    """
    if all(isinstance(name, str) for name in class_names):
        return call(class_names)
    return tuple(None if names is None else call(names) for names in class_names)


def shapes_of(input_shape: Shape | tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the shapes of one input, or of several, as a tuple of shapes.

    >>> shapes_of((8, 8, 3)), shapes_of(((8, 8, 3), (5,)))
    (((8, 8, 3),), ((8, 8, 3), (5,)))
    """
    shapes: Any = input_shape if has_several_inputs(input_shape) else (input_shape,)
    return tuple(shapes)


def has_several_inputs(input_shape: Shape | tuple[Shape, ...]) -> bool:
    """Return whether the shape is that of several inputs."""
    return len(input_shape) > 0 and isinstance(input_shape[0], tuple)


ALL = slice(None)


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """A rank's part of a global batch; its arrays are new and contiguous.

    They are on the host; `dataclasses.replace` can replace them by arrays of a device.

    Attributes
    ----------
    x : ndarray, shape ``(n, *input_shape)``; n may be 0 in the last step
        Samples of the model's dtype, or raw uint8 if `prepare` is set. For a model with several
        inputs a tuple of one array each.
    y : ndarray, labels int64 ``(n,)``, or targets ``(n, ...)`` of the dtype of a model's outputs
        The model's dtype, or float32 if that has 16 bits. If samples are mixed, the probability of
        each class, ``(n, classes)``. For a model with several outputs a tuple of one array each.
    samples : ndarray of int64, shape ``(n,)``
        Indices in the data set.
    index : int
        Step of the epoch.
    total : int
        Samples of the global batch: the n of all ranks together.
    shards : tuple of Shard
        The slices that are computed one by one; if empty, all rows are one slice.
    words : ndarray of uint32, shape ``(n, prepare.words)``, or None if `x` is prepared
        Random bits of the augmentations.
    prepare : Prepare or None
        Preparation of `x` on the device, if any.
    """

    x: Any
    y: Any
    samples: NDArray[np.int64]
    index: int
    total: int
    shards: tuple[Shard, ...] = ()
    words: NDArray[np.uint32] | None = None
    prepare: Prepare | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        x, y = (
            " and ".join(f"{part.dtype} {part.shape}" for part in parts(value))
            for value in (self.x, self.y)
        )
        return f"Batch({len(self)} of {self.total} samples of step {self.index}: x {x}, y {y})"

    def inputs(self, backend: Backend, rows: slice = ALL) -> Any:
        """Copy rows of `x` to the device, augmented, normalised and of the model's dtype."""
        x = each(lambda part: backend.asarray(part[rows]), self.x)
        if self.prepare is None:
            return x
        assert self.words is not None
        return self.prepare(backend, x, backend.asarray(self.words[rows]))

    def targets(self, rows: slice = ALL) -> Any:
        """Return rows of `y`."""
        return each(lambda part: part[rows], self.y)
