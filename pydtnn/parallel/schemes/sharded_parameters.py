"""ZeRO-2 and ZeRO-3: every rank keeps a part of the gradients, and of the parameters.

Buckets stay where they are. The memory of what a rank does not keep is released, and used again
when backward writes gradients there, or the values of the other ranks arrive (`Bucket.clear`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.schemes.sharded import ShardedOptimizer
from pydtnn.utils.request import Completed, Request


class ShardedGradients(ShardedOptimizer):
    """`ShardedOptimizer` in which each rank keeps its part of the gradients only.

    A bucket is reduced (reduce-scatter) as soon as backward completes it; the memory of the parts
    of other ranks is then free. The messages, and the results, are those of `ShardedOptimizer`.
    With accumulation, gradients are whole until the last micro-batch completes them.

    References
    ----------
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC
    2020, section 5.2 (P_os+g).
    """

    equal = sums_gradients = exact = True
    excludes: ClassVar[Mapping[str, str]] = {
        "GPU": "{0} releases memory of the host, not of a GPU; use ShardedOptimizer"
    }

    def bucket_ready(self, bucket: Bucket) -> None:
        """Sum the bucket's gradients, and keep this rank's part of the sum."""
        super().reduce(bucket)
        bucket.clear(bucket.grads, self.local_slice(bucket))

    def released(self, passes: int) -> tuple[int, int]:
        """Return the bytes of parameters and of gradients that a rank never has at the same time.

        They are those of a step of one or more passes, the last of which completes gradients;
        buckets are whole one after the other.
        """
        grads = self._of_others(lambda bucket, part: [bucket.grads[part]])
        return 0, sum(grads[:-1]) if passes == 1 else 0

    def _of_others(self, arrays: Callable[[Bucket, slice], Sequence[np.ndarray]]) -> list[int]:
        """Return the bytes of arrays of each bucket's parts of other ranks, the most last."""

        def nbytes(bucket: Bucket, part: slice) -> int:
            return sum(array.nbytes for array in arrays(bucket, part))

        return sorted(
            nbytes(bucket, slice(0, len(bucket.values))) - nbytes(bucket, self.local_slice(bucket))
            for bucket in self.buckets
        )

    def reduce(self, bucket: Bucket) -> None:
        """Do nothing: `bucket_ready` has summed the gradients."""


class ShardedParameters(ShardedGradients):
    """`ShardedGradients` in which each rank keeps its part of the parameters only, too.

    Before a layer's pass, the parts of its buckets are gathered from the others (all-gather), and
    those of the next buckets in advance; the others are released. A step sends each bucket three
    times instead of twice: gathered for forward and for backward, and its gradients reduced. Of a
    16-bit model, matrices are gathered in 16 bits, rounded by the rank that has the master values.

    In a step a rank has its own part; evaluations and checkpoints gather all.

    References
    ----------
    Rajbhandari et al., 2020, section 5.3 (P_os+g+p). Zhao et al., "PyTorch FSDP: experiences on
    scaling fully sharded data parallel", VLDB 2023, section 3.
    """

    equal = sums_gradients = exact = True
    excludes: ClassVar[Mapping[str, str]] = {
        **ShardedGradients.excludes,
        "format of weights": "a format of weights rounds whole matrices, got {0}, which divides "
        "them; use ShardedGradients, or dtype bfloat16",
    }

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        self._complete = True  # whether this rank has the master values of all ranks
        self._gathered: dict[int, Request] = {}  # what layers read of the parts of others

    def released(self, passes: int) -> tuple[int, int]:
        held = self._of_others(lambda bucket, part: [array[part] for array in bucket.stored])
        return sum(held) - sum(self._of_others(Bucket.read)[-2:]), super().released(passes)[1]

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        self._complete = True
        super().start(buckets)

    def broadcast_parameters(self) -> None:
        self.gather_all()
        super().broadcast_parameters()

    def before_layer(self, now: Sequence[Bucket], ahead: Sequence[Bucket]) -> None:
        """Gather what the next pass reads, start to gather what later ones read; release others."""
        if self._complete:
            self.release_all()
        kept = {bucket.index for bucket in (*now, *ahead)}
        for bucket in self.buckets:
            if bucket.index in self._gathered and bucket.index not in kept:
                self.release(bucket)
        for bucket in (*now, *ahead):
            self.start_gather(bucket)
        for bucket in now:
            self._gathered[bucket.index].wait()
            self._gathered[bucket.index] = Completed()  # not to be waited for before each layer

    def start_gather(self, bucket: Bucket) -> None:
        """Start to gather what layers read of a bucket, unless this rank has it."""
        if bucket.index in self._gathered:
            return
        bucket.refresh(self.local_slice(bucket))
        cuts = pairwise(accumulate(self.counts[bucket.index], initial=0))
        parts = [bucket.read(slice(start, stop)) for start, stop in cuts]
        rank, size = self.place, self.parts
        others = [(rank + shift) % size for shift in range(1, size)]  # each begins with another
        request = self._gathered[bucket.index] = self.group.exchange(
            [(array, other) for other in others for array in parts[rank]],
            [(array, other) for other in others for array in parts[other]],
            2 * len(self.buckets) + bucket.index,  # exact sums have the tags below
        )
        self.in_flight.add(request)

    def release(self, bucket: Bucket) -> None:
        """Free the memory of the parts of other ranks."""
        if bucket.index in self._gathered:
            self._gathered.pop(bucket.index).wait()
        for array in bucket.stored:
            bucket.clear(array, self.local_slice(bucket))

    def gather_all(self) -> None:
        """Gather the master values of all parameters, unless this rank has them."""
        if not self._complete:
            self.release_all()
            super().gather_all()
            self._complete = True

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step()
        self.release_all()

    def release_all(self) -> None:
        """Keep this rank's part of each bucket only."""
        for bucket in self.buckets:
            self.release(bucket)
        self._complete = False
