"""Sums of gradients over the axes of a mesh besides "data", before a scheme receives them."""

from __future__ import annotations

from collections import deque

from pydtnn.comm import Request
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.utils.request import Together


def further_axes(group: str) -> tuple[str, ...]:
    """Return the axes of a reduction group without "data".

    >>> further_axes("data+height+width")
    ('height', 'width')
    """
    return tuple(axis for axis in group.split("+") if axis != "data")


class AxisSums:
    """Pass buckets to a scheme, those of groups with further axes once their sums are complete.

    The scheme receives the buckets in the order in which backward completes them. A bucket waits
    for its sum until a later layer has completed another one: points that do not depend on the
    speed of messages, so that all ranks make the scheme's calls between the same other calls.

    Parameters
    ----------
    exchange : GradientExchange
    mesh : Mesh or None
    """

    def __init__(self, exchange: GradientExchange, mesh: Mesh | None) -> None:
        self._exchange, self._mesh = exchange, mesh
        self._waiting: deque[tuple[Bucket, Request]] = deque()

    def ready(self, bucket: Bucket) -> None:
        """Called when the gradients of this rank are complete, in the same order on every rank."""
        while self._waiting and self._waiting[0][0].ready_at != bucket.ready_at:
            self._pass_on()
        axes = further_axes(bucket.group)
        if axes or self._waiting:
            self._waiting.append((bucket, self._start(bucket, axes)))
        else:
            self._exchange.bucket_ready(bucket)

    def _start(self, bucket: Bucket, axes: tuple[str, ...]) -> Request:
        """Start the sum over the last axis, after those over the others."""
        if not axes:
            return Together([])
        assert self._mesh is not None
        for axis in axes[:-1]:
            self._mesh.group(axis).allreduce(bucket.grads)
        return self._mesh.group(axes[-1]).iallreduce(bucket.grads)

    def progress(self) -> None:
        """Called between two layers of backward."""
        if self._waiting:
            self._waiting[0][1].test()
        self._exchange.in_flight.progress()

    def finish(self) -> None:
        """Pass on all buckets; called when backward is complete."""
        while self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        bucket, request = self._waiting.popleft()
        request.wait()
        self._exchange.bucket_ready(bucket)
