"""Arrays that are computed when they are read, as elementwise maps of other arrays.

Batch norm, the addition of a residual block and ReLU are maps per element with coefficients per
channel. The layer that reads their result, a convolution that packs its input, can apply them while
packing, so that the result is neither written to memory nor read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    again : callable or None
        Computes the values of an array in new memory from `parts`, so that they need not be kept.
    parts : sequence
        What `again` receives.
    sources : sequence of (Deferred or None)
        For each term, the object of its array if that may be dropped.
    drops : bool
        Whether stored values need not be kept, as the terms are.
    nothing : Array or None
        Zeros (C,): terms without factor need not be kept, as the values are stored.
    """

    __slots__ = (
        *("__weakref__", "again", "array", "drops", "keep", "limit", "nothing", "parts", "relu"),
        *("shift", "sources", "sums", "terms"),
    )

    def __init__(
        self, *terms: Term, shift: Array | None = None, relu: bool = False, limit: float = inf
    ) -> None:
        self.terms = terms
        self.shift = shift
        self.relu, self.limit = relu, limit
        self.array: Array | None = None
        self.keep = self.drops = False
        self.nothing: Array | None = None
        self.sums: Any = None
        self.again: Callable[[Sequence[Any]], Array] | None = None
        self.parts: Sequence[Any] = ()
        self.sources: Sequence[Deferred | None] = ()

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

    def drop(self) -> None:
        """Release arrays that are not needed, and until `restore` those computed `again`."""
        if self.drops:
            self.array = None
        elif self.nothing is not None and self.array is not None:
            stored, zero = Term(self.array), self.nothing
            plain = [term.factor is None for term in self.terms]
            if plain.count(True) == 1:
                self.terms = tuple(
                    stored if alone else term._replace(factor=zero)
                    for term, alone in zip(self.terms, plain, strict=True)
                )
                self.shift = zero
        elif self.again is not None:
            self.terms, self.array = (), None
        elif any(source is not None for source in self.sources):
            pairs = zip(self.terms, self.sources, strict=True)
            self.terms = tuple(t if s is None else t._replace(x=None) for t, s in pairs)

    def restore(self) -> Deferred:
        """Compute what was dropped again; return the object."""
        if self.again is not None and not self.terms:
            self.hold(self.again(self.parts))
        elif any(term.x is None for term in self.terms):
            pairs = zip(self.terms, self.sources, strict=True)
            self.terms = tuple(
                t if s is None else t._replace(x=s.restore().array) for t, s in pairs
            )
        return self

    def hold(self, array: Array) -> None:
        """Store values that were dropped."""
        self.array, self.terms = array, (Term(array),)

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
