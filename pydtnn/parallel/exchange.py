"""How gradients are exchanged.

A parallel scheme is a small object that sees buckets, an optimizer and a communicator; it never
sees a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.comm.arrays import fill, to_host
from pydtnn.comm.chain import Queue
from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.metered import Metered
from pydtnn.comm.schedules.rule import bucket_bytes
from pydtnn.kernels.reference.family import Number
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.sums import Sums, average
from pydtnn.utils.option import option, set_options, signature_of

if TYPE_CHECKING:
    from pydtnn.optimizers import Optimizer


class GradientExchange:
    """The communication of one training step; this one does none.

    A scheme overrides what it needs. Every method is collective: all ranks call it, in the same
    order.

    Parameters
    ----------
    comm : Communicator
    sums : callable
        Makes what adds up gradients, of the communicator: `Sums`, or one that compresses.
    **options
        What the class declares by `pydtnn.parallel.option.option`.

    Attributes
    ----------
    comm : Metered
        The communicator, counting what goes through it in ``comm.traffic``.
    sums : Sums
        What adds up gradients.
    buckets : tuple of Bucket
        The model's parameters and gradients, known after `start`.
    samples : int
        Samples this rank has trained on since parameters were last averaged; the trainer counts
        them.
    requests : dict of int to Request
        Messages of a step, by the bucket's index; see `started`.
    under_way : Queue
        Those that were not complete when last asked.
    local_samples : int
        Samples of this rank in the current step, set by the trainer before `loss_scale`.
    equal : bool
        Of the class: whether all ranks hold the same parameters between steps. Otherwise evaluating
        and saving are done with their average, and each rank goes on with its own.
    sums_gradients : bool
        Of the class: whether gradients meet in `sums` alone, so that they can be compressed.
    exact : bool
        Of the class, not inherited: whether nothing else depends on the number of ranks, so that
        sums in a fixed order make all of training exact.
    keeps_gradients : bool
        Of the class: whether gradients of one step are used in another, as float16 models, whose
        loss is scaled from step to step, do not bear.
    static : bool
        Of the class, not inherited: whether every step makes the same calls and reads nothing on
        the host that changes from step to step, so that one of them can be captured in a CUDA graph
        and replayed.

    Raises
    ------
    ValueError
        If `sums` does not suit the scheme.
    """

    equal = False
    sums_gradients = False
    exact = False
    static = True
    keeps_gradients = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("exact", "static"):  # not inherited: who changes a step must say them anew
            if name not in vars(cls):
                setattr(cls, name, False)
        cls.__signature__ = signature_of(cls)  # type: ignore[attr-defined]

    def __init__(
        self, comm: Communicator, *, sums: Callable[[Communicator], Sums] = Sums, **options: Any
    ) -> None:
        set_options(self, options)
        self.comm = Metered(comm)
        self.sums = sums(self.comm)
        if type(self.sums) is not Sums and not self.sums_gradients:
            raise ValueError(
                f"{type(self).__name__}: ranks do not sum gradients, so these cannot be compressed "
                "or summed exactly; use a scheme that sums gradients, such as AllReduce"
            )
        if self.sums.shards is not None and not self.exact:
            raise ValueError(
                f"{type(self).__name__}: results depend on the number of ranks, so exact sums are "
                "not supported; use AllReduce or ShardedOptimizer"
            )
        self.buckets: tuple[Bucket, ...] = ()
        self.samples = 0
        self.local_samples = 1
        self._aside: tuple[list[np.ndarray], int] | None = None  # one's own values and samples
        self.requests: dict[int, Request] = {}
        self.under_way = Queue()

    def why_not_captured(self) -> str:
        """Say why a step's messages cannot be captured in a CUDA graph; empty where they can."""
        if not self.static:
            return f"the steps of {type(self).__name__} are not all alike"
        if not self.sums.capturable:
            return f"{type(self.sums).__name__} works on the host"
        if not self.comm.capturable:
            return "messages go by way of MPI (--comm nccl avoids it)"
        return ""

    def loss_scale(self, local: int, total: int) -> float:
        """Factor on the gradient of a rank's summed loss.

        Parameters
        ----------
        local, total : int
            Samples of this rank and of all ranks in this step.
        """
        return 1 / total

    def bucket_bytes(self, total: int, usual: int) -> tuple[int, ...]:
        """Choose the lengths of buckets, in B, where the user does not: by the ranks' hosts.

        Parameters
        ----------
        total : int
            Of all gradients, in B.
        usual : int
            Inside a host; where the cut must not show in results, in exact training; and where
            messages go from GPU to GPU.

        Returns
        -------
        tuple of int
            In the order in which backward completes them; the last length is also that of all that
            follow.
        """
        if self.sums.shards is not None or self.comm.capturable:
            return (usual,)
        return bucket_bytes(self.comm.hosts, total, usual)

    def begin(self, buckets: tuple[Bucket, ...]) -> None:
        """Begin to train a model, or go on; the trainer calls it when `fit` begins.

        The first time it is `start`. After that what the scheme and its sums have kept, such as
        residuals of compression and gradients that are delayed, stays as it is.
        """
        if self.buckets is buckets:
            self.broadcast_parameters()
        else:
            self.start(buckets)

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        """Begin training from rank 0's parameters; where training is resumed, `load` follows."""
        self.buckets = buckets
        self.sums.prepare(buckets)
        self.broadcast_parameters()

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks, whatever the others have been given meanwhile."""
        for bucket in self.buckets:
            self.comm.broadcast(bucket.values)
        self.samples = 0

    def free(self) -> None:
        """Free the groups of ranks that `start` has made; another `fit` would make new ones.

        Call it where a process makes many exchanges: MPI libraries have only some thousand groups.
        A scheme that splits groups off in `start` frees them here and calls ``super().free()``.
        """
        self.sums.free()
        self.buckets = ()

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when a bucket's gradients are complete, in the same order on every rank."""

    def started(self, bucket: Bucket, request: Request) -> None:
        """Keep the request of a message of a bucket, until it is `taken` or all are complete."""
        self.requests[bucket.index] = request
        self.under_way.add(request)

    def taken(self, bucket: Bucket) -> Request:
        """Remove and return the request that `bucket_ready` has started of a bucket.

        Raises
        ------
        ValueError
            If there is none, as where a subclass leaves the bucket out.
        """
        request = self.requests.pop(bucket.index, None)
        if request is None:
            raise ValueError(
                f"{type(self).__name__}: expected bucket_ready to start a message of bucket "
                f"{bucket.index} of {len(self.buckets)}, got none; call "
                "super().bucket_ready(bucket) for every bucket, or override the method that "
                "waits for it"
            )
        return request

    def drain(self) -> None:
        """Wait for the messages under way, in the order in which they were started."""
        self.under_way.wait()
        self.requests.clear()

    def progress(self) -> None:
        """Called between two layers of backward: MPI makes progress only while it is called.

        Tests the oldest message under way.
        """
        self.under_way.progress()

    def update(self, optimizer: Optimizer) -> None:
        """Update the parameters; called after backward."""
        optimizer.step()

    def abandon(self) -> None:
        """Complete what is under way and forget it: the step will not be made."""
        self.drain()

    def step_alone(self, optimizer: Optimizer) -> None:
        """Update this rank's parameters by its own gradients, unless it had no samples.

        Then it keeps its parameters and state, without momentum or weight decay, and only counts
        the update, as schedules and periods go by these counts.
        """
        if self.local_samples:
            optimizer.step()
        else:
            optimizer.skip()

    # -- parameters that differ between ranks -----------------------------------------------------

    def average_parameters(self) -> None:
        """Average the parameters of all ranks; each counts by its `samples` since the last time."""
        self.average(bucket.values for bucket in self.buckets)

    def average(self, arrays: Iterable[np.ndarray]) -> None:
        """Average arrays over all ranks, in place; each rank counts by its `samples`, now spent."""
        average(self.comm, arrays, self.samples)
        self.samples = 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average of all ranks, to evaluate or save it, and afterwards one's own again."""
        if self.equal or self._aside is not None:
            yield
            return
        own, samples = [bucket.values.copy() for bucket in self.buckets], self.samples
        self._aside = own, samples
        try:
            self.average_parameters()
            yield
        finally:
            for bucket, values in zip(self.buckets, own, strict=True):
                bucket.values[...] = values
            self.samples, self._aside = samples, None

    # -- optimizer state that is spread over the ranks (`pydtnn.optimizers.Share`) ----------------

    def own(self, bucket: Bucket, whole: bool) -> slice:
        """Return the stretch of a bucket that this rank updates."""
        return slice(0, len(bucket.values))

    def gather(self, bucket: Bucket, part: np.ndarray) -> np.ndarray:
        """Put together what the ranks hold of an array as long as a bucket."""
        return part

    def total(self, value: Number) -> Number:
        """Add up a number that each rank has of its `own` stretches."""
        return value

    # -- saving -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What must be saved to continue: named arrays and numbers.

        A scheme that keeps more adds it to what this returns: ``super().state() | {...}``.
        """
        state = self.sums.state()
        if self.equal:
            return state
        own, samples = self._aside or ([bucket.values for bucket in self.buckets], self.samples)
        return state | by_name("own", self.buckets, own) | {"samples": samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned, after `start`."""
        self.sums.load(state)
        if "samples" not in state:
            return
        self.samples = int(state["samples"])
        from_names("own", self.buckets, [bucket.values for bucket in self.buckets], state)


def by_name(
    what: str, buckets: Iterable[Bucket], arrays: Iterable[np.ndarray]
) -> dict[str, np.ndarray]:
    """Copy arrays as long as the buckets into NumPy's, of their parameters: "<what>/<name>"."""
    return {
        f"{what}/{entry.name}": to_host(array[entry.slice]).reshape(entry.shape)
        for bucket, array in zip(buckets, arrays, strict=True)
        for entry in bucket.parameters
    }


def from_names(
    what: str,
    buckets: Iterable[Bucket],
    arrays: Iterable[np.ndarray],
    state: Mapping[str, np.ndarray],
) -> None:
    """Fill arrays as long as the buckets from what `by_name` returned."""
    for bucket, array in zip(buckets, arrays, strict=True):
        for entry in bucket.parameters:
            fill(array[entry.slice], state[f"{what}/{entry.name}"].reshape(-1))


class AllReduce(GradientExchange):
    """Synchronous data parallelism: gradients are summed over all ranks, bucket by bucket.

    Parameters
    ----------
    comm : Communicator
    overlap : bool
        Send each bucket as soon as backward completes it, while the rest of backward still runs.
        Without, all are sent after backward, one after the other: the same sums, so that the gain
        of overlap can be measured.
    sums : callable
        See `GradientExchange`.

    References
    ----------
    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
    section 3.2.
    """

    equal = sums_gradients = exact = static = True
    overlap: bool = option(True)

    def bucket_ready(self, bucket: Bucket) -> None:
        """Start to sum the bucket's gradients."""
        if self.overlap:
            self.started(bucket, self.start_sum(bucket))

    def update(self, optimizer: Optimizer) -> None:
        """Update each bucket as its sum arrives."""
        self.under_way = Queue()  # which the update waits for
        optimizer.step(self.wait)

    def wait(self, bucket: Bucket) -> None:
        """Return when the bucket's gradients are summed over all ranks."""
        if self.overlap:
            self.taken(bucket).wait()
        else:
            self.start_sum(bucket).wait()

    def start_sum(self, bucket: Bucket) -> Request:
        """Start to sum a bucket's gradients over all ranks."""
        return self.sums.start(bucket)
