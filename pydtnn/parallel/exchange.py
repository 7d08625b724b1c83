"""Exchange of gradients between ranks.

A parallel scheme operates on buckets, an optimizer and a communicator, never on layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from pydtnn.comm.communicator import Communicator
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

    A scheme overrides `update` and, if necessary, `loss_scale`, `start`, `bucket_ready`, `arrays`
    and `average_parameters`. Every method is collective: all ranks call it, in the same order.

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
    in_flight : MessagesInFlight
        Messages that a scheme has started and not waited for: they are tested between two layers
        of backward, and complete before an evaluation, a checkpoint, and the next step if one is
        abandoned.
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
        Set in `update` by `average_parameters`, and by schemes whose ranks have all waited for each
        other in another way: the trainer then sums the losses since the last time. Reset before
        `update`.
    equal : bool
        Class attribute: whether all ranks have the same parameters between steps. Otherwise the
        average is evaluated and saved, and each rank continues with its own parameters.
    sums_gradients : bool
        Class attribute: whether gradients are combined only in `sums`, so that they can be
        compressed.
    exact : bool
        Class attribute, not inherited: whether nothing else depends on the number of ranks, so that
        sums in a fixed order make training reproducible.
    static : bool
        Class attribute, not inherited: whether every step makes the same calls and reads no host
        values that change between steps, so that a step can be captured in a CUDA graph and
        replayed.

    Notes
    -----
    A scheme may also have a method ``check(optimizer)``, which raises ValueError if it does not
    work with an update rule, and attributes: ``excludes``, which has for features of a run (the
    names in `pydtnn.training.capabilities`) why the scheme, {0} in the sentence, cannot be combined
    with them, and what to do; and ``keeps_gradients``, if gradients of one step are
    used in another: float16 models, whose loss scale changes between steps, do not support it.
    """

    equal = sums_gradients = exact = False
    static = True
    buckets: tuple[Bucket, ...]
    samples: float
    sums_losses: bool

    def loss_scale(self, local: int, total: int) -> float:
        """Return the factor on the gradient of a rank's summed loss.

        Parameters
        ----------
        local, total : int
            Samples of this rank and of all ranks in this step.
        """
        return 1 / total

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        """Start training with rank 0's parameters; `load` follows if training is resumed."""
        self.buckets = buckets
        for sums in self._all_sums:
            sums.prepare(buckets)
        self.broadcast_parameters()

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when a bucket's gradients are complete, in the same order on every rank."""

    def update(self, optimizer: Optimizer) -> None:
        """Update the parameters; called after backward."""
        optimizer.step()

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        """Return the arrays that a scheme keeps between steps by name, one as long as each bucket.

        Checkpoints contain them. What is not finite in them after a step that is abandoned, whose
        gradients `bucket_ready` has received, is set to 0.
        """
        return {}

    def average_parameters(self) -> None:
        """Average the parameters of all ranks, weighted by `samples` since the last average."""
        average_by_samples(self, (bucket.values for bucket in self.buckets))

    # -- what few schemes override ----------------------------------------------------------------

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks, at the start of each `fit`."""
        for bucket in self.buckets:
            self.comm.broadcast(bucket.values)
        self.samples = 0

    def state(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: named arrays and numbers.

        Schemes with further state return ``super().state() | {...}``. Messages are completed.
        """
        self.in_flight.wait()
        state: dict[str, Any] = {}
        for sums in self._all_sums:
            state |= sums.state()
        for what, arrays in self.arrays().items():
            state |= by_name(what, self.buckets, arrays)
        if self.equal:
            return state
        own, samples = self._aside or ([bucket.values for bucket in self.buckets], self.samples)
        return state | by_name("own", self.buckets, own) | {"samples": samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`; called after `start`."""
        for sums in self._all_sums:
            sums.load(state)
        for what, arrays in self.arrays().items():
            from_names(what, self.buckets, arrays, state)
        if "samples" not in state:
            return
        self.samples = int(state["samples"])
        from_names("own", self.buckets, [bucket.values for bucket in self.buckets], state)

    def free(self) -> None:
        """Free the groups of ranks that `start` has created; another `fit` creates new ones.

        Call it if a process creates many exchanges: MPI libraries support only a few thousand
        groups. A scheme that creates groups in `start` frees them here and calls
        ``super().free()``.
        """
        for sums in self._all_sums:
            sums.free()
        self.buckets = ()

    # -- what schemes call ------------------------------------------------------------------------

    def step_alone(self, optimizer: Optimizer) -> None:
        """Update this rank's parameters with its own gradients, unless it had no samples.

        Without samples, parameters and state are unchanged (no momentum or weight decay), and only
        the count of updates increases, which schedules and periods depend on.
        """
        if self.local_samples:
            optimizer.step()
        else:
            optimizer.skip()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("exact", "static"):  # subclasses must redeclare them
            if name not in vars(cls):
                setattr(cls, name, False)
        for name in GONE.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}: {name} is not overridden any more; {GONE[name]}")
        cls.__signature__ = signature_of(cls)

    def __init__(
        self, comm: Communicator, *, sums: Callable[[Communicator], Sums] = Sums, **options: Any
    ) -> None:
        set_options(self, options)
        self.comm = comm
        self.sums = sums(self.comm)
        self.in_flight = MessagesInFlight(type(self).__name__)
        self.buckets, self.samples = (), 0
        self.local_samples = 1
        self.sums_losses, self.met = self.equal, False
        self._all_sums = [self.sums]
        self._aside: tuple[list[np.ndarray], float] | None = None  # this rank's values and samples

    def __getattr__(self, name: str) -> Any:
        """Return what has a former name."""
        if name in FORMER:
            return FORMER[name](self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class MessagesInFlight(Queue):
    """Messages in progress, oldest first, some of them those of a bucket.

    Parameters
    ----------
    who : str
        First word of errors.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who
        self._of_buckets: dict[int, Request] = {}

    def put(self, bucket: Bucket, request: Request) -> None:
        """Add the request of a bucket's message."""
        self._of_buckets[bucket.index] = request
        self.add(request)

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket.index in self._of_buckets

    def pop(self, bucket: Bucket) -> Request:
        """Remove and return the request of a bucket.

        Raises
        ------
        ValueError
            If there is none, for example because a subclass skips the bucket.
        """
        request = self._of_buckets.pop(bucket.index, None)
        if request is None:
            raise ValueError(
                f"{self._who}: expected bucket_ready to start a message of bucket {bucket.index}, "
                "got none; call super().bucket_ready(bucket) for every bucket, or override the "
                "method that waits for it"
            )
        return request

    def wait(self) -> None:
        """Wait for all messages, in order."""
        super().wait()
        self._of_buckets.clear()

    def forget(self) -> None:
        """Forget messages that this rank waits for in another way, or not at all."""
        self._entries.clear()


def average_by_samples(exchange: GradientExchange, arrays: Iterable[np.ndarray]) -> None:
    """Average arrays over all ranks in place, weighted by `samples`, which is reset to 0."""
    average(exchange.comm, arrays, exchange.samples)
    exchange.samples, exchange.met = 0, True


# -- what a trainer does with a scheme ------------------------------------------------------------


@runtime_checkable
class GathersParameters(Protocol):
    """A scheme whose ranks have only parts of the parameters in a step."""

    def before_layer(self, now: Sequence[Bucket], ahead: Sequence[Bucket]) -> None:
        """Called before the pass of a layer, with the buckets that it and later ones read."""

    def gather_all(self) -> None:
        """Gather all elements of the parameters on this rank, until the next step."""


def gather_parameters(exchange: GradientExchange) -> None:
    """Make sure that this rank has all elements of its parameters. Collective."""
    if isinstance(exchange, GathersParameters):
        exchange.gather_all()


def begin(exchange: GradientExchange, buckets: tuple[Bucket, ...]) -> None:
    """Start or continue the training of a model, at the start of `fit`.

    The first call invokes `start`. Later calls preserve the state of the scheme and its sums, such
    as residuals of compression and delayed gradients.
    """
    if exchange.buckets is buckets:
        exchange.broadcast_parameters()
    else:
        exchange.start(buckets)
        check_names(exchange, GradientExchange)


def abandon(exchange: GradientExchange) -> None:
    """Complete the messages of a step that is skipped.

    What is not finite in `arrays` and in the state of sums, such as a residual that gradients were
    added to, is set to 0.
    """
    exchange.in_flight.wait()
    kept = (array for sums in exchange._all_sums for _, array in sums.arrays())
    for array in chain(*exchange.arrays().values(), kept):
        array[~(abs(array) < np.inf)] = 0


def make_equal(exchange: GradientExchange) -> None:
    """Make the parameters of all ranks equal and whole, at the end of training."""
    exchange.in_flight.wait()
    if not exchange.equal:
        exchange.average_parameters()
    gather_parameters(exchange)


@contextlib.contextmanager
def averaged(exchange: GradientExchange) -> Iterator[None]:
    """Context in which all ranks have the average, to evaluate or save; then it is restored.

    Messages are completed, as training may end here.
    """
    exchange.in_flight.wait()
    gather_parameters(exchange)
    if exchange.equal or exchange._aside is not None:
        yield
        return
    own, samples = [bucket.values.copy() for bucket in exchange.buckets], exchange.samples
    exchange._aside = own, samples
    try:
        exchange.average_parameters()
        yield
    finally:
        for bucket, values in zip(exchange.buckets, own, strict=True):
            bucket.values[...] = values
        exchange.samples, exchange._aside = samples, None


def _whole(exchange: GradientExchange) -> contextlib.nullcontext[None]:
    gather_parameters(exchange)
    return contextlib.nullcontext()


FORMER: dict[str, Callable[[GradientExchange], Any]] = {
    "add_request": lambda exchange: exchange.in_flight.put,
    "pop_request": lambda exchange: exchange.in_flight.pop,
    "drain": lambda exchange: exchange.in_flight.wait,
    "forget": lambda exchange: exchange.in_flight.forget,
    "average": lambda exchange: partial(average_by_samples, exchange),
    "begin": lambda exchange: partial(begin, exchange),
    "averaged": lambda exchange: partial(averaged, exchange),
    "make_equal": lambda exchange: partial(make_equal, exchange),
    "whole": lambda exchange: partial(_whole, exchange),
    "exact_norms": lambda exchange: exchange.sums.shards is not None,
}
"""Former methods of schemes."""

GONE = {
    "abandon": "return what steps change by arrays()",
    "drain": "add requests to self.in_flight",
    "forget": "add requests to self.in_flight",
    "progress": "add requests to self.in_flight",
    "make_equal": "override average_parameters",
    "gathers": "define before_layer and gather_all",
    "whole": "define before_layer and gather_all",
}
"""What classes do in place of overriding former members."""


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
            self.in_flight.put(bucket, self.start_sum(bucket))

    def update(self, optimizer: Optimizer) -> None:
        """Update each bucket when its sum is complete."""
        self.in_flight.forget()  # the update waits for its requests
        optimizer.step(self.wait)

    def wait(self, bucket: Bucket) -> None:
        """Wait until the bucket's gradients are summed over all ranks."""
        if self.overlap:
            self.in_flight.pop(bucket).wait()
        else:
            self.start_sum(bucket).wait()

    def start_sum(self, bucket: Bucket) -> Request:
        """Start to sum a bucket's gradients over all ranks."""
        return self.sums.start(bucket)
