"""Whole parameters of which ranks of a mesh have parts, for rules that require them.

Each has an owner among the ranks with its parts. In an update these send values and gradients to
the owner, which alone stores the state of the rule, and it sends the new values back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import Bucket, BucketEntry, Parameter, ParameterBuffer, ParameterPart

Cost = Callable[[BucketEntry], int]
"""Operations of the update of a parameter."""


class OwnedParameter(NamedTuple):
    """A parameter of which this rank has a part.

    Attributes
    ----------
    part : ParameterPart
    owner : mapping of str to int
        Position of the owner along the axes of the part.
    own : sequence of Array
        Values and gradients of this rank's part, flat.
    whole : sequence of Array
        Those of the whole parameter; empty on other ranks than the owner.
    """

    part: ParameterPart
    owner: Mapping[str, int]
    own: Sequence[Array]
    whole: Sequence[Array]


class WholeParameters:
    """The parameters of some buckets that ranks have parts of, and those that this rank owns.

    Owners are balanced by the cost of their updates, and the same on all ranks of a mesh, in which
    buckets are alike.

    Parameters
    ----------
    buckets : sequence of (Bucket, slice)
        With the range whose gradients this rank has.
    cost : callable
    first_index : int
        Index of the buckets of whole parameters.

    Attributes
    ----------
    parameters : list of OwnedParameter
        In an order that is the same on all ranks.
    buffers : list of ParameterBuffer
        Whole parameters that this rank owns.
    shapes : dict of str to tuple of int
        Shapes of all whole parameters of the buckets, by name.
    """

    def __init__(
        self,
        buckets: Iterable[tuple[Bucket, slice]],
        cost: Callable[[BucketEntry], int],
        first_index: int,
    ) -> None:
        self.parameters: list[OwnedParameter] = []
        self.buffers: list[ParameterBuffer] = []
        found = [(*pair, b, present) for b, present in buckets for pair in whole_entries(b)]
        self.shapes = {p.name: entry.shape for p, entry, *_ in found}
        loads: dict[tuple[str, ...], np.ndarray] = {}
        for p, entry, bucket, present in sorted(
            found, key=lambda one: (-cost(one[1]), one[0].name)
        ):
            if p.part is None or not present.start <= entry.slice.start < present.stop:
                continue
            cuts = sorted(p.part.cuts, key=lambda cut: cut.axis)
            load = loads.setdefault(p.part.axes, np.zeros([len(cut.bounds) - 1 for cut in cuts]))
            place = np.unravel_index(load.argmin(), load.shape)
            load[place] += cost(entry)
            owner = {axis: int(at) for axis, at in zip(p.part.axes, place, strict=True)}
            own, whole = [bucket.values[entry.slice], bucket.grads[entry.slice]], list[Array]()
            if owner.items() <= p.position.items():
                same = Parameter(p.name, entry.shape, p.initializer, decay=p.decay, form=p.form)
                options: dict[str, Any] = {"first_index": first_index + len(self.buffers)}
                options |= {"backend": bucket.buffer.backend, "dtype": bucket.buffer.dtype}
                self.buffers.append(ParameterBuffer([(same, 0)], **options))
                whole = [same.master, same.grad]
            self.parameters.append(OwnedParameter(p.part, owner, own, whole))


def whole_entries(bucket: Bucket) -> list[tuple[Parameter, BucketEntry]]:
    """Return the parameters of a bucket, and its entries with the shapes of whole parameters."""
    named = {p.name: p for p in bucket.buffer.parameters}
    pairs = [(named[entry.name], entry) for entry in bucket.parameters]
    return [(p, entry._replace(shape=p.whole_shape)) for p, entry in pairs]
