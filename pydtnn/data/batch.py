"""The data of one rank in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.order import Shard
from pydtnn.data.prepare import Prepare
from pydtnn.data.several import each, parts

if TYPE_CHECKING:
    from pydtnn.kernels.backend import Backend

Array = NDArray[Any]

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
