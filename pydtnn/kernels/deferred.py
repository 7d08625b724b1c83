"""Arrays that are computed when they are read, as elementwise maps of other arrays.

Batch norm, the addition of a residual block and ReLU are maps per element with coefficients per
channel. The layer that reads their result, a convolution that packs its input, can apply them while
packing, so that the result is neither written to memory nor read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

Array = Any


class Term(NamedTuple):
    """``factor (x - pivot)``: an array ``(..., C)`` with a factor and a pivot (C,) or None.

    Subtracting a pivot near the mean before multiplying preserves precision for an array with a
    mean that is large relative to its deviation.
    """

    x: Array
    pivot: Array | None = None
    factor: Array | None = None


@dataclass(eq=False)
class Source:
    """An array that is dropped after forward, and made again for the first reader in backward.

    Attributes
    ----------
    make : callable
        Computes it in new memory from `parts`, which are kept anyway.
    parts : sequence
    array : Array or None
        The array, once it has been made again.
    """

    make: Callable[[Sequence[Any]], Array]
    parts: Sequence[Any]
    array: Array | None = None


class Deferred:
    """``v = shift + sum of factor (x - pivot)`` over one or two terms, then a ReLU if `relu`.

    The ReLU is ``min(max(v, 0), limit)``.

    Parameters
    ----------
    *terms : Term
        One or two, of equal shape and dtype.
    shift : Array, shape (C,), optional
    relu : bool
    limit : float
        6 for ReLU6.

    Attributes
    ----------
    array : Array or None
        The values, once they have been computed and stored.
    keep : bool
        Whether the first reader must store the values in `array`, for other readers.
    sums : ndarray or None
        Float64 sums over the rows, computed by the kernel that wrote the array; defined by the
        producer.
    drops : bool
        Whether `drop` releases stored values: readers in backward compute them of the terms.
    zeros : Array or None
        Zeros (C,) if `drop` releases the array of the only term without factor, of which stored
        values take the place, so that they are ``v = array + 0 (x - pivot)``.
    sources : sequence of (Source or None)
        For each term, what makes its array again if `drop` releases it; empty if none does.
    """

    __slots__ = (
        *("__weakref__", "array", "drops", "keep", "limit", "relu", "shift", "sources", "sums"),
        *("terms", "zeros"),
    )

    def __init__(
        self, *terms: Term, shift: Array | None = None, relu: bool = False, limit: float = inf
    ) -> None:
        self.terms = terms
        self.shift = shift
        self.relu, self.limit = relu, limit
        self.array: Array | None = None
        self.keep = self.drops = False
        self.zeros: Array | None = None
        self.sums: Any = None
        self.sources: Sequence[Source | None] = ()

    @classmethod
    def of(cls, array: Array, sums: Any) -> Deferred:
        """Wrap an existing array, with sums over its rows."""
        value = cls(Term(array))
        value.array, value.sums = array, sums
        return value

    def of_terms(self, *terms: Term, shift: Array | None) -> Deferred:
        """Return the same map of other arrays."""
        return Deferred(*terms, shift=shift, relu=self.relu, limit=self.limit)

    def forget_terms(self) -> None:
        """Release the arrays of the terms, if the values are stored, until `take_terms`."""
        if self.array is not None:
            self.terms, self.shift = (Term(self.array),), None

    def take_terms(self, other: Deferred) -> None:
        """Take the terms of the same values that were computed again; share the stored values."""
        self.terms, self.shift = other.terms, other.shift
        other.array = self.array

    @property
    def is_array(self) -> bool:
        """Whether the values are those of an array, as it is."""
        return not self.relu and self.shift is None and self.terms[0].factor is None

    @property
    def source(self) -> Source | None:
        """What makes the values again, if they are those of an array that may be dropped."""
        return self.sources[0] if len(self.sources) == 1 and self.is_array else None

    def drop(self) -> None:
        """Release arrays after their last reader in forward: see `drops`, `zeros` and `sources`."""
        if self.drops:
            self.array = None
        elif self.zeros is not None and sum(t.factor is None for t in self.terms) == 1:
            self.shift = self.zeros
            self.terms = tuple(
                Term(self.array) if t.factor is None else t._replace(factor=self.zeros)
                for t in self.terms
            )
        for k, source in enumerate(self.sources):
            if source is not None:
                self._put(k, None)

    def restore(self) -> Deferred:
        """Make the arrays of terms again, for a reader in backward; return the object."""
        for k, source in enumerate(self.sources):
            if source is not None and self.terms[k].x is None:
                if source.array is None:
                    source.array = source.make(source.parts)
                self._put(k, source.array)
        return self

    def _put(self, k: int, x: Array | None) -> None:
        """Set the array of a term, and the values if they are those of this array."""
        self.terms = (*self.terms[:k], self.terms[k]._replace(x=x), *self.terms[k + 1 :])
        if self.source is not None:
            self.array = x

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
