"""Check of the first backward pass: layers overwrite every gradient of their parameters.

Before the pass all gradients are set to one NaN, with bits that no operation on other values
returns. If a bucket still contains it when its gradients are complete, before they are sent to
other ranks, a layer has not called `store_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pydtnn.layers.parameters import Bucket
from pydtnn.model import Model

CHUNK_ELEMENTS = 1 << 14
"""Number of elements compared at once."""


UNTOUCHED = {4: 0x7FC5A3E1, 8: 0x7FF8C5A3E196D287}
"""Bits of the NaN, by the bytes of an element."""

OnReady = Callable[[Bucket, int], None]


def check_stored(
    model: Model,
    on_ready: OnReady | None = None,
    slots: Sequence[int] | None = None,
    part: int | None = None,
) -> OnReady:
    """Fill all gradients with the NaN; return `on_ready`, preceded by a check of the bucket.

    Parameters
    ----------
    model : Model
    on_ready, slots, part
        Arguments of `Model.backward_shards` in the pass that follows, which must not accumulate.

    Returns
    -------
    callable
        Raises ValueError, with layer and parameter, if backward has not overwritten a gradient.
    """
    for bucket in model.buckets_of(part):
        for slot in slots or [0]:
            bucket.buffer.write_to(slot)  # which allocates it
            _fill(bucket, bucket.gradients(slot))
        bucket.buffer.write_to(0)

    def ready(bucket: Bucket, shard: int) -> None:
        if slots or shard == 0:  # without slots, other shards add to the gradients of the first
            grads = model.backend.to_numpy(bucket.gradients(slots[shard] if slots else 0))
            for entry in bucket.parameters:
                if _contains(grads[entry.slice]):
                    raise ValueError(_sentence(model, entry.name))
        if on_ready is not None:
            on_ready(bucket, shard)
        if bucket.buffer.shared:
            _fill(bucket, bucket.grads)  # for the next buckets in this memory

    return ready


def _fill(bucket: Bucket, grads: np.ndarray) -> None:
    """Set gradients to the NaN; padding between parameters remains 0."""
    for entry in bucket.parameters:
        part = grads[entry.slice]
        part.view(f"uint{8 * part.itemsize}")[...] = UNTOUCHED[part.itemsize]


def _contains(grads: np.ndarray) -> bool:
    """Return whether gradients contain the NaN, with little memory."""
    bits = grads.view(f"uint{8 * grads.itemsize}")
    pieces = (bits[i : i + CHUNK_ELEMENTS] for i in range(0, len(bits), CHUNK_ELEMENTS))
    return any((piece == UNTOUCHED[grads.itemsize]).any() for piece in pieces)


def _sentence(model: Model, name: str) -> str:
    layer = next(one for one in model.layers if name in [p.name for p in one.parameters])
    return (
        f"{layer.name}: backward of {type(layer).__name__} must store a gradient of the whole "
        f"parameter {name}, got none or a part of it; call store_grad of the parameter"
    )
