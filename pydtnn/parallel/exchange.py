"""Exchange of gradients between ranks.

A parallel scheme operates on buckets, an optimizer and a communicator, never on layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.rule import bucket_bytes
from pydtnn.kernels.reference.family import Number
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.named import by_name, from_names
from pydtnn.parallel.sums import Sums, average
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.option import option, set_options, signature_of
from pydtnn.utils.request import Queue, Request
from pydtnn.utils.validate import check_names

if TYPE_CHECKING:
    from pydtnn.optimizers import Optimizer


class GradientExchange(StoresArguments):
    """Base class of the communication in a training step; it does not communicate itself.

    Schemes override some of its methods. Every method is collective: all ranks call it, in the same
    order.

    Parameters
    ----------
    comm : Communicator
    sums : callable
        Factory of the sums of gradients, called with the communicator: `Sums`, or a subclass that
        compresses.
    **options
        Options that the class declares with `pydtnn.parallel.option.option`.

    Attributes
    ----------
    comm : Communicator
        It counts its messages and bytes in ``comm.traffic``.
    sums : Sums
        Sums of gradients.
    buckets : tuple of Bucket
        The model's parameters and gradients, set by `start`.
    samples : int
        Samples this rank has trained on since parameters were last averaged; the trainer counts
        them.
    local_samples : int
        Samples of this rank in the current step, set by the trainer before `loss_scale`.
    sums_losses : bool
        Whether losses and metrics are summed over all ranks in every step, so that ranks wait for
        each other; by default if they are `equal`. Otherwise a step sends only the messages of the
        scheme, and the trainer sums the losses when ranks have met, at the latest at the end of an
        epoch.
    met : bool
        Set in `update` by `average`, and by schemes whose ranks have all waited for each other in
        another way: the trainer then sums the losses since the last time. Reset before `update`.
    equal : bool
        Class attribute: whether all ranks have the same parameters between steps. Otherwise the
        average is evaluated and saved, and each rank continues with its own parameters.
    sums_gradients : bool
        Class attribute: whether gradients are combined only in `sums`, so that they can be
        compressed.
    exact : bool
        Class attribute, not inherited: whether nothing else depends on the number of ranks, so that
        sums in a fixed order make training reproducible.
    keeps_gradients : bool
        Class attribute: whether gradients of one step are used in another. Not supported by float16
        models, whose loss scale changes between steps.
    gathers : bool
        Class attribute: whether a rank has parts of the parameters in a step, unless `before_layer`
        gathers them.
    static : bool
        Class attribute, not inherited: whether every step makes the same calls and reads no host
        values that change between steps, so that a step can be captured in a CUDA graph and
        replayed.
    """

    equal = sums_gradients = exact = keeps_gradients = gathers = False
    static = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("exact", "static"):  # subclasses must redeclare them
            if name not in vars(cls):
                setattr(cls, name, False)
        cls.__signature__ = signature_of(cls)

    def __init__(
        self, comm: Communicator, *, sums: Callable[[Communicator], Sums] = Sums, **options: Any
    ) -> None:
        set_options(self, options)
        self.comm = comm
        self.sums = sums(self.comm)
        self.exact_norms = self.sums.shards is not None
        self.buckets: tuple[Bucket, ...] = ()
        self.samples: float = 0
        self.local_samples = 1
        self.sums_losses, self.met = self.equal, False
        self._aside: tuple[list[np.ndarray], float] | None = None  # this rank's values and samples
        self._requests: dict[int, Request] = {}  # messages of a step, by the bucket's index
        self._pending = Queue()  # requests that were not complete at their last test

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the scheme does not work with this update rule."""

    def loss_scale(self, local: int, total: int) -> float:
        """Return the factor on the gradient of a rank's summed loss.

        Parameters
        ----------
        local, total : int
            Samples of this rank and of all ranks in this step.
        """
        return 1 / total

    def bucket_bytes(self, total: int, usual: int) -> tuple[int, ...]:
        """Return the default lengths of buckets, in B, which depend on the hosts of the ranks.

        Parameters
        ----------
        total : int
            Size of all gradients, in B.
        usual : int
            Length within a host, in exact training (results must not depend on the partition), and
            for messages between GPUs.

        Returns
        -------
        tuple of int
            Lengths in the order in which backward completes the buckets; the last one applies to
            all following buckets.
        """
        if self.sums.shards is not None or self.comm.capturable:
            return (usual,)
        return bucket_bytes(self.comm.hosts, total, usual)

    def begin(self, buckets: tuple[Bucket, ...]) -> None:
        """Start or continue the training of a model; called by the trainer at the start of `fit`.

        The first call invokes `start`. Later calls preserve the state of the scheme and its sums,
        such as residuals of compression and delayed gradients.
        """
        if self.buckets is buckets:
            self.broadcast_parameters()
        else:
            self.start(buckets)
            check_names(self, GradientExchange)

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        """Start training with rank 0's parameters; `load` follows if training is resumed."""
        self.buckets = buckets
        self.sums.prepare(buckets)
        self.broadcast_parameters()

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks."""
        for bucket in self.buckets:
            self.comm.broadcast(bucket.values)
        self.samples = 0

    def free(self) -> None:
        """Free the groups of ranks that `start` has created; another `fit` creates new ones.

        Call it if a process creates many exchanges: MPI libraries support only a few thousand
        groups. A scheme that creates groups in `start` frees them here and calls
        ``super().free()``.
        """
        self.sums.free()
        self.buckets = ()

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when a bucket's gradients are complete, in the same order on every rank."""

    def add_request(self, bucket: Bucket, request: Request) -> None:
        """Store the request of a bucket's message until `pop_request` or `drain` is called."""
        self._requests[bucket.index] = request
        self._pending.add(request)

    def pop_request(self, bucket: Bucket) -> Request:
        """Remove and return the request that `bucket_ready` has started for a bucket.

        Raises
        ------
        ValueError
            If there is none, for example because a subclass skips the bucket.
        """
        request = self._requests.pop(bucket.index, None)
        if request is None:
            raise ValueError(
                f"{type(self).__name__}: expected bucket_ready to start a message of bucket "
                f"{bucket.index} of {len(self.buckets)}, got none; call "
                "super().bucket_ready(bucket) for every bucket, or override the method that "
                "waits for it"
            )
        return request

    def drain(self) -> None:
        """Wait for all pending messages, in the order in which they were started."""
        self._pending.wait()
        self._requests.clear()

    def forget(self) -> None:
        """Forget the pending messages, which this rank waits for in another way or not at all."""
        self._pending = Queue()

    def progress(self) -> None:
        """Called between two layers of backward: MPI makes progress only while it is called.

        Tests the oldest pending message.
        """
        self._pending.progress()

    def before_layer(self, now: Sequence[Bucket], ahead: Sequence[Bucket]) -> None:
        """Called in a step before a layer's pass, with the buckets that it and later ones read.

        Only for schemes that have `gathers`, and before layers with parameters.
        """

    def update(self, optimizer: Optimizer) -> None:
        """Update the parameters; called after backward."""
        optimizer.step()

    def abandon(self) -> None:
        """Complete and discard pending messages of a step that is skipped.

        `bucket_ready` has received its gradients. What is not finite in `arrays` and in the state
        of `sums`, such as a residual that they were added to, is set to 0.
        """
        self.drain()
        for array in chain(*self.arrays().values(), (kept for _, kept in self.sums.arrays())):
            array[~(abs(array) < np.inf)] = 0

    def step_alone(self, optimizer: Optimizer) -> None:
        """Update this rank's parameters with its own gradients, unless it had no samples.

        Without samples, parameters and state are unchanged (no momentum or weight decay), and only
        the count of updates increases, which schedules and periods depend on.
        """
        if self.local_samples:
            optimizer.step()
        else:
            optimizer.skip()

    # -- parameters that differ between ranks -----------------------------------------------------

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this rank has all elements of its parameters. Collective."""
        return contextlib.nullcontext()

    def make_equal(self) -> None:
        """Make the parameters of all ranks equal, at the end of training."""
        if not self.equal:
            self.average_parameters()

    def average_parameters(self) -> None:
        """Average the parameters of all ranks, weighted by `samples` since the last average."""
        self.average(bucket.values for bucket in self.buckets)

    def average(self, arrays: Iterable[np.ndarray]) -> None:
        """Average arrays over all ranks in place, weighted by `samples`, which is reset to 0."""
        average(self.comm, arrays, self.samples)
        self.samples, self.met = 0, True

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager: use the average of all ranks, to evaluate or save, then restore.

        Pending messages are completed, as training may end here.
        """
        self.drain()
        if self.equal or self._aside is not None:
            with self.whole():
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
        """Return the range of a bucket that this rank updates."""
        return slice(0, len(bucket.values))

    def gather(self, bucket: Bucket, part: np.ndarray) -> np.ndarray:
        """Return an array as long as a bucket, gathered from the parts of all ranks."""
        return part

    def total(self, value: Number) -> Number:
        """Return the sum of a number that each rank computes from its `own` ranges."""
        return value

    # -- saving -----------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        """Return the arrays that a scheme keeps between steps by name, one as long as each bucket.

        Checkpoints contain them.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: named arrays and numbers.

        Schemes with further state return ``super().state() | {...}``. Pending messages are
        completed.
        """
        self.drain()
        state = self.sums.state()
        for what, arrays in self.arrays().items():
            state |= by_name(what, self.buckets, arrays)
        if self.equal:
            return state
        own, samples = self._aside or ([bucket.values for bucket in self.buckets], self.samples)
        return state | by_name("own", self.buckets, own) | {"samples": samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`; called after `start`."""
        self.sums.load(state)
        for what, arrays in self.arrays().items():
            from_names(what, self.buckets, arrays, state)
        if "samples" not in state:
            return
        self.samples = int(state["samples"])
        from_names("own", self.buckets, [bucket.values for bucket in self.buckets], state)


class AllReduce(GradientExchange):
    """Synchronous data parallelism: gradients are summed over all ranks, bucket by bucket.

    Parameters
    ----------
    comm : Communicator
    overlap : bool
        Send each bucket as soon as backward completes it, while the rest of backward runs. If
        False, buckets are sent one by one after backward, with the same sums, so that the gain
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
            self.add_request(bucket, self.start_sum(bucket))

    def update(self, optimizer: Optimizer) -> None:
        """Update each bucket when its sum is complete."""
        self.forget()  # the update waits for its requests
        optimizer.step(self.wait)

    def wait(self, bucket: Bucket) -> None:
        """Wait until the bucket's gradients are summed over all ranks."""
        if self.overlap:
            self.pop_request(bucket).wait()
        else:
            self.start_sum(bucket).wait()

    def start_sum(self, bucket: Bucket) -> Request:
        """Start to sum a bucket's gradients over all ranks."""
        return self.sums.start(bucket)
