"""Arrays that are not there yet: an elementwise map of arrays that are, computed where it is read.

Batch norm, the addition of a residual block and ReLU are maps per element with coefficients per
channel. The layer that reads their result, a convolution that packs its input anyway, can apply
them in passing, and the result need not be written to memory, nor read again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any


class Term(NamedTuple):
    """``factor (x - pivot)``: an array ``(..., C)`` with a factor and a pivot (C,) or None.

    Subtracting a pivot near the mean before multiplying keeps the digits of an array whose mean is
    large beside its deviation.
    """

    x: Array
    pivot: Array | None = None
    factor: Array | None = None


class Deferred:
    """``v = shift + sum of factor (x - pivot) over one or two terms``, then ``max(v, 0)`` if asked.

    Parameters
    ----------
    *terms : Term
        One or two, of equal shape and dtype.
    shift : Array, shape (C,), optional
    relu : bool

    Attributes
    ----------
    array : Array or None
        The values, once they have been computed and kept.
    keep : bool
        Whether who computes the values shall keep them in `array`, for others who read them.
    sums : ndarray or None
        Float64 sums over the rows that were taken in passing; who sets them says which.
    """

    __slots__ = ("array", "keep", "relu", "shift", "sums", "terms")

    def __init__(self, *terms: Term, shift: Array | None = None, relu: bool = False) -> None:
        self.terms = terms
        self.shift = shift
        self.relu = relu
        self.array: Array | None = None
        self.keep = False
        self.sums: Any = None

    @classmethod
    def of(cls, array: Array, sums: Any) -> Deferred:
        """Wrap an array that is there, with sums over its rows."""
        value = cls(Term(array))
        value.array, value.sums = array, sums
        return value

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return tuple(self.terms[0].x.shape)

    @property
    def dtype(self) -> Any:
        """Type of the values."""
        return self.terms[0].x.dtype

    def __len__(self) -> int:
        return len(self.terms[0].x)
