"""Compressors: a pair of functions, and sums of the gradients that they compress."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from pydtnn.comm.checks import fill, on_host, to_host
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.wrapper import Wrapper
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.sums import Sums
from pydtnn.utils.request import Chain, Completed, Request
from pydtnn.utils.split import even_cuts
from pydtnn.utils.validate import check_float

STEPS = "compression_steps"


class LossySums(Sums):
    """Sums of gradients that are compressed with loss.

    They are computed on the host: gradients on a device are copied to the host, which blocks, and
    the sum is copied back.

    Parameters
    ----------
    comm : Communicator

    Attributes
    ----------
    groups : list of Communicator
        Copies of `comm` with separate messages, from the first `prepare` to `free`; as many as
        `orders`, in each of which all ranks start their messages in the same order.
    steps : dict of int to int
        Number of times each bucket has been sent, by its index.
    """

    capturable = False
    keeps_gradients = True
    orders = 1

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.groups: list[Communicator] = []
        self.steps: dict[int, int] = {}

    @property
    def group(self) -> Communicator:
        """The first of the groups."""
        return self.groups[0]

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Start at step 0. Collective: all ranks call it."""
        self.groups = self.groups or [self.comm.split(0) for _ in range(self.orders)]
        self.steps = {bucket.index: 0 for bucket in buckets}

    def free(self) -> None:
        """Free the groups. Collective: all ranks call it."""
        while self.groups:
            self.groups.pop().free()

    def start(self, bucket: Bucket) -> Request:
        """Start to replace a bucket's gradients by their sum over all ranks."""
        return self.send(bucket) if on_host(bucket.grads) else Chain(self._through_host(bucket))

    def _through_host(self, bucket: Bucket) -> Iterator[Request]:
        mirror = replace(bucket, grads=to_host(bucket.grads))
        yield self.send(mirror)
        fill(bucket.grads, mirror.grads)

    @abstractmethod
    def send(self, bucket: Bucket) -> Request:
        """Implement `start` for a bucket with gradients on the host."""

    @abstractmethod
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and writeable arrays that persist between steps."""

    def part(self, bucket: Bucket, counts: Sequence[int], out: np.ndarray) -> None:
        """Compute each rank's part of the sum; the bucket's gradients become the sum, too."""
        self.start(bucket).wait()
        begin = sum(counts[: self.comm.rank])
        out[...] = bucket.grads[begin : begin + len(out)]

    def state(self) -> dict[str, Any]:
        """Return the arrays, which may differ between ranks, and the number of steps."""
        state: dict[str, Any] = {name: array.copy() for name, array in self.arrays()}
        return state | {STEPS: max(self.steps.values(), default=0)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state` after `prepare`; nothing changes if it does not fit."""
        arrays = dict(self.arrays())
        if STEPS not in state:
            raise ValueError(
                "checkpoint: expected the state of compression, got none, as its training did not "
                "compress gradients; continue without --compress"
            )
        for name, array in arrays.items():
            if name not in state or np.shape(state[name]) != array.shape:
                raise ValueError(
                    f"checkpoint: expected an array {name!r} of shape {array.shape}, got none; "
                    "continue with the same compressor and model"
                )
        for name, array in arrays.items():
            array[...] = state[name]
        self.steps = dict.fromkeys(self.steps, int(state[STEPS]))


def is_finite(array: np.ndarray) -> bool:
    """Return whether no element of a contiguous array is infinite or NaN."""
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):  # squares may overflow where elements are finite
        return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())


def forget_if_not_finite(error: np.ndarray) -> None:
    """Set an error that is not finite to 0, as it would propagate to all following steps."""
    if not is_finite(error):
        error.fill(0)


@dataclass(frozen=True)
class Context:
    """Rank, bucket and step of compressed gradients.

    Random numbers depend only on the context, so they are the same on every machine, after resuming
    training, and in `compress` and `restore`.

    Parameters
    ----------
    seed : int
        Seed of the random numbers.
    step : int
        Number of times the bucket has been sent before.
    bucket : int
        Index of the bucket.
    rank : int
        Rank that computed the gradients.
    sizes : tuple of int
        Lengths of the bucket's parameters, in order.
    shapes : tuple of tuple of int
        Their shapes; empty where parts of them are compressed (`Compressor`, served).
    """

    seed: int
    step: int
    bucket: int
    rank: int
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def random(self) -> np.random.Generator:
        """Return a Philox generator for this rank, bucket and step."""
        return self._generator(1 + self.rank)

    @property
    def shared_random(self) -> np.random.Generator:
        """Return a Philox generator that is the same on all ranks."""
        return self._generator(0)

    def of(self, rank: int) -> Context:
        """Return the context of another rank."""
        return replace(self, rank=rank)

    def _generator(self, who: int) -> np.random.Generator:
        key = np.array([self.seed % 2**64, stream("compression")], "uint64")
        counter = np.array([0, self.step, self.bucket, who], "uint64")
        return np.random.Generator(np.random.Philox(counter=counter, key=key))


Lengths = Sequence[int] | np.ndarray
"""Number of elements of each of several arrays."""


def pack(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the bytes of arrays, each at a multiple of its element size.

    Returns
    -------
    ndarray of uint8
    """
    lengths = [part.size for part in parts]
    packed = np.empty(size_of(parts, lengths), np.uint8)
    for part, place in zip(parts, unpack(packed, parts, lengths), strict=True):
        place[...] = part
    return packed


def unpack(
    packed: np.ndarray, like: Sequence[np.ndarray], lengths: Lengths
) -> tuple[np.ndarray, ...]:
    """Return the packed arrays, as views.

    Parameters
    ----------
    packed : ndarray of uint8
        Result of `pack`, or an empty array of that length, aligned as NumPy aligns new arrays.
    like : sequence of ndarray
        Arrays of the same types.
    lengths : Lengths
    """
    starts, _ = _layout(like, lengths)
    return tuple(
        packed[start : start + length * part.itemsize].view(part.dtype)
        for start, length, part in zip(starts, lengths, like, strict=True)
    )


def _layout(like: Sequence[np.ndarray], lengths: Lengths) -> tuple[list[int], int]:
    """Return the offset of each array and the total length, in B."""
    starts, end = [], 0
    for part, length in zip(like, lengths, strict=True):
        start = -(-end // part.itemsize) * part.itemsize
        starts.append(start)
        end = start + length * part.itemsize
    return starts, end


def size_of(like: Sequence[np.ndarray], lengths: Lengths) -> int:
    """Return the length of a message, in B."""
    return _layout(like, lengths)[1]


def send_to_all(comm: Communicator, arrays: Sequence[np.ndarray], tag: int) -> Iterator[Request]:
    """Send this rank's array to all others and receive theirs; yield the requests.

    Parameters
    ----------
    comm : Communicator
    arrays : sequence of ndarray
        One array per rank, as long as the array of that rank; all but this rank's are written.
    tag : int

    Yields
    ------
    Request
    """
    return send_to_each(comm, [arrays[comm.rank]] * comm.size, arrays, tag)


def send_to_each(
    comm: Communicator, arrays: Sequence[np.ndarray], received: Sequence[np.ndarray], tag: int
) -> Iterator[Request]:
    """Send another array to each rank, and receive one of each; yield the requests.

    Parameters
    ----------
    comm : Communicator
    arrays, received : sequence of ndarray
        One array per rank; this rank's own is copied.
    tag : int

    Yields
    ------
    Request
    """
    # Each rank starts with its next neighbour, so that no rank is the first target of all others.
    others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
    receives = [comm.irecv(received[other], other, tag) for other in reversed(others)]
    sends = [comm.isend(arrays[other], other, tag) for other in others]
    received[comm.rank][...] = arrays[comm.rank]
    yield from receives
    yield from sends


class PackedGradients:
    """The gradients of a bucket, contiguous, without the padding between parameters.

    Parameters
    ----------
    bucket : Bucket
    feedback, momentum, served
        See `Compressor`.

    Attributes
    ----------
    sizes, shapes : tuple
        Lengths and shapes of the parameters.
    x : ndarray (n,)
        Values to compress; with feedback, the compression error between steps.
    velocity, served : ndarray (n,)
        Momentum of the gradients, and the compression error of the sums that this rank serves;
        empty without.
    total : ndarray (n,)
        Buffer for restored values.
    """

    def __init__(
        self, bucket: Bucket, *, feedback: float, momentum: float = 0.0, served: bool = False
    ) -> None:
        self.feedback, self.momentum = feedback, momentum
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self._runs: list[tuple[slice, slice]] = []  # without padding: in the bucket, in `x`
        size = 0
        for entry in bucket.parameters:
            there, here = entry.slice, slice(size, size + entry.slice.stop - entry.slice.start)
            self._places[entry.name] = here, entry.shape
            if self._runs and self._runs[-1][0].stop == there.start:
                before, ours = self._runs.pop()
                there, here = slice(before.start, there.stop), slice(ours.start, here.stop)
            self._runs.append((there, here))
            size = here.stop
        self.sizes = tuple(e.slice.stop - e.slice.start for e in bucket.parameters)
        self.shapes = tuple(e.shape for e in bucket.parameters)
        self.x = np.zeros(size, bucket.grads.dtype)
        self.velocity = np.zeros_like(self.x[: size * (momentum > 0)])
        self.served = np.zeros_like(self.x[: size * (served and feedback)])
        self.total = np.empty_like(self.x)
        kinds = {
            "error": (feedback > 0, self.x),
            "momentum": (momentum > 0, self.velocity),
            "served_error": (served and feedback, self.served),
        }
        self._lasting = {kind: array for kind, (lasts, array) in kinds.items() if lasts}

    def take(self, grads: np.ndarray) -> np.ndarray:
        """Copy a bucket's gradients, or their momentum, to `x`, added to the error.

        Returns a read-only view of `x`.
        """
        for there, here in self._runs:
            values = grads[there]
            if self.velocity.size:
                self.velocity[here] *= self.momentum
                self.velocity[here] += values
                values = self.velocity[here]
            if self.feedback:
                self.x[here] *= self.feedback
                self.x[here] += values
            else:
                self.x[here] = values
        read_only = self.x.view()
        read_only.flags.writeable = False
        return read_only

    def give(self, grads: np.ndarray) -> None:
        """Copy `total` to a bucket's gradients."""
        for there, here in self._runs:
            grads[there] = self.total[here]

    def forget(self) -> None:
        """Subtract `total`, which was sent, from `x`, and restart the momentum of what was sent."""
        if self.feedback:
            with np.errstate(invalid="ignore"):
                self.x -= self.total
            forget_if_not_finite(self.x)
            if self.velocity.size:
                self.velocity[self.total != 0] = 0
        forget_if_not_finite(self.velocity)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names and arrays of each parameter that persist between steps."""
        for kind, array in self._lasting.items():
            for name, (here, shape) in self._places.items():
                yield f"{kind}/{name}", array[here].reshape(shape)


MAX_REQUESTS = 2**14
"""Maximum number of concurrent requests: each uses two tags."""

Parts = tuple[np.ndarray, ...]
"""A bucket's compressed gradients: flat arrays of numbers, of any type and length."""


@dataclass(frozen=True)
class Compressor:
    """Pair of functions that compress and restore gradients; an instance is an argument `sums=`.

    Parameters
    ----------
    compress : callable
        ``compress(x, context)`` returns a tuple of flat arrays. `x` are the gradients of a bucket,
        (n,) float32 or float64, not empty, without padding; they cannot be written. Parts may be
        views of them; other arrays must not be written again.
    restore : callable
        ``restore(parts, out, context)`` adds the restored gradients to `out` (n,), of the type of
        `x`, in place. If `x` is not finite but the restored values are, floats among the parts are
        set to NaN, so that the sum is not finite.
    feedback : bool or float
        Error feedback: add the compression error to the rank's next gradients. With ``x = g + e``,
        `x` is compressed and ``e = x - restored``, so that every gradient is sent eventually. A
        number f in [0, 1) is a factor that errors decay by: ``x = g + f e``. Rounding errors of
        sums of parts are not fed back. The error is saved in checkpoints.
    momentum : float
        m in [0, 1): the momentum ``u = m u + g`` of each rank is compressed in place of its
        gradients. With feedback, elements of u that were sent start from 0 again. To be used with
        an optimizer without momentum.
    adds : bool
        Whether the parts of all ranks can be added element by element and then restored: an
        allreduce sums them. Otherwise each rank sends its parts to all others, and all restore them
        in the order of the ranks. Of P ranks, each sends its parts 2 (P - 1) / P or P - 1 times.
    served : bool
        Whether rank r adds up part r of P parts of the bucket, compresses the sum, with feedback of
        its error, too, and sends it to all others. Each rank sends the parts of a bucket
        2 (P - 1) / P times.
    varies : bool
        Whether the lengths of the parts differ between ranks and steps. Lengths are then exchanged
        in an additional message. Cannot be combined with `adds` or `served`, nor `adds` with
        `served`.
    seed : int
        Seed of the random numbers; see `Context`.

    References
    ----------
    Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, section 3; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, algorithm 1; Karimireddy et
    al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    algorithm 2.

    Examples
    --------
    >>> from pydtnn.comm import Serial
    >>> from pydtnn.parallel.exchange import AllReduce
    >>> halves = Compressor(
    ...     compress=lambda x, context: (x.astype("float16"),),
    ...     restore=lambda parts, out, context: np.add(out, parts[0], out=out),
    ... )
    >>> exchange = AllReduce(Serial(), sums=halves)
    """

    compress: Callable[[np.ndarray, Context], Parts]
    restore: Callable[[Parts, np.ndarray, Context], object]
    _: KW_ONLY
    feedback: float = False
    momentum: float = 0.0
    adds: bool = False
    served: bool = False
    varies: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_float("Compressor", "momentum", self.momentum, at_least=0, below=1)
        ways = [name for name in ("adds", "served", "varies") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(
                f"Compressor: {ways[0]} and {ways[1]} cannot both be true, as they need parts of "
                "different kinds; set one of them to False"
            )

    def __call__(self, comm: Communicator) -> CompressedSums:
        """Create the sums of one rank."""
        return CompressedSums(comm, self)


class CompressedSums(LossySums):
    """Sums of the compressed gradients of all ranks; equal on all ranks.

    Gradients are compressed and restored with one rank, too, so that training is the same method
    for any number of ranks. Besides messages, memory for two sets of gradients is required.

    Parameters
    ----------
    comm : Communicator
    compressor : Compressor
    """

    def __init__(self, comm: Communicator, compressor: Compressor) -> None:
        super().__init__(comm)
        self.compressor = compressor
        self._kept: dict[int, PackedGradients] = {}
        self._sizes: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._adders: dict[np.dtype, Communicator] = {}
        self._started = 0

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Initialize errors with 0. Collective: all ranks call it."""
        super().prepare(buckets)
        c = self.compressor
        own: dict[str, Any] = {"feedback": c.feedback, "momentum": c.momentum, "served": c.served}
        self._kept = {b.index: PackedGradients(b, **own) for b in buckets}
        self._sizes.clear()

    def free(self) -> None:
        """Free the groups. Collective: all ranks call it."""
        for adder in self._adders.values():
            if adder is not self.group:
                adder.free()
        self._adders.clear()
        super().free()

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and array of each error and momentum."""
        for kept in self._kept.values():
            yield from kept.arrays()

    def send(self, bucket: Bucket) -> Request:
        """Compress a bucket's gradients and start to replace them by the sum over all ranks."""
        kept = self._kept[bucket.index]
        if not kept.x.size:
            return Completed()
        context = Context(
            self.compressor.seed,
            self.steps[bucket.index],
            bucket.index,
            self.comm.rank,
            kept.sizes,
            kept.shapes,
        )
        self.steps[bucket.index] += 1
        x = kept.take(bucket.grads)
        if self.compressor.served:
            return Chain(self._serve(kept, bucket.grads, x, context))
        parts = self._compress(x, context)
        if not is_finite(x):
            parts = self._showing(kept.total, parts, context)
        if self.compressor.adds:  # the parts become their sum
            parts = tuple(np.require(part, requirements=["C", "W"]) for part in parts)
            self._forget(kept, parts, context)
            return Chain(self._reduce(kept, bucket.grads, parts, context))
        request = Chain(self._gather(kept, bucket.grads, parts, context))
        self._forget(kept, parts, context)  # while the messages are in progress
        return request

    def _compress(self, x: np.ndarray, context: Context) -> Parts:
        """Call the compressor and check what it returns."""
        with np.errstate(all="ignore"):  # values that are not finite appear in the next loss
            parts = self.compressor.compress(x, context)
        if not isinstance(parts, tuple) or not all(
            isinstance(part, np.ndarray) and part.ndim == 1 for part in parts
        ):
            raise TypeError(
                f"Compressor: compress must return a tuple of flat arrays, got {_shown(parts)}; "
                "for one array return (array,)"
            )
        sizes, key = [part.size for part in parts], (context.bucket, context.sizes)
        if not self.compressor.varies and sizes != self._sizes.setdefault(key, sizes):
            raise ValueError(
                f"Compressor: expected parts of lengths {self._sizes[key]} as before, "
                f"got {sizes}; use Compressor(..., varies=True)"
            )
        return parts

    def _restore(self, total: np.ndarray, parts: Parts, context: Context) -> None:
        """Add the restored parts to `total`."""
        with np.errstate(all="ignore"):
            result = self.compressor.restore(parts, total, context)
        if isinstance(result, np.ndarray) and not np.may_share_memory(result, total):
            raise TypeError(
                "Compressor: restore must add to its argument out in place, got a new array as "
                "return value; use out += ... or np.add(out, ..., out=out)"
            )

    def _showing(self, total: np.ndarray, parts: Parts, context: Context) -> Parts:
        """Return parts that restore to values that are not finite if the gradients are not.

        A compressor that sends only some of the gradients may skip a NaN. Floats among the parts
        are then set to NaN.
        """
        marked = tuple(
            np.full_like(part, np.nan) if _is_float(part.dtype) else part for part in parts
        )
        for shown in (parts, marked):
            total.fill(0)
            self._restore(total, shown, context)
            if not is_finite(total):
                return shown
        raise ValueError(
            f"Compressor: expected restore to return NaN, as gradients of rank {context.rank} are "
            "infinite or NaN, got finite values; propagate NaN in compress and restore"
        )

    def _forget(self, kept: PackedGradients, parts: Parts, context: Context) -> None:
        """Subtract the restored parts from `x`, which leaves the compression error."""
        if self.compressor.feedback:
            kept.total.fill(0)
            self._restore(kept.total, parts, context)
        kept.forget()

    def _reduce(
        self, kept: PackedGradients, grads: np.ndarray, parts: Parts, context: Context
    ) -> Iterator[Request]:
        """Sum the parts of all ranks, and restore the sum."""
        yield from [self._adder(part.dtype).iallreduce(part) for part in parts]
        kept.total.fill(0)
        self._restore(kept.total, parts, context)
        kept.give(grads)

    def _adder(self, dtype: np.dtype) -> Communicator:
        """Return the communicator that sums a type. Collective: all ranks call it.

        MPI libraries sum 16-bit floats slowly or not at all, so the ring of `pydtnn.comm.schedules`
        is used for these, unless the user has chosen a schedule.
        """
        if dtype not in self._adders:
            ring = dtype.itemsize == 2 and not _has_schedule(self.group)
            self._adders[dtype] = Scheduled(self.group, "ring") if ring else self.group
        return self._adders[dtype]

    def _gather(
        self, kept: PackedGradients, grads: np.ndarray, parts: Parts, context: Context
    ) -> Iterator[Request]:
        """Exchange parts with all other ranks; restore and add them in the order of the ranks."""
        message = pack(parts)  # immediately: parts may be views of `x`, which changes later
        comm, tag = self.group, self._tag()
        lengths = [np.array([part.size for part in parts]) for _ in range(comm.size)]
        if self.compressor.varies:
            yield from send_to_all(comm, lengths, tag)
        packed = [np.empty(size_of(parts, sizes), np.uint8) for sizes in lengths]
        packed[comm.rank] = message
        yield from send_to_all(comm, packed, tag + 1)
        kept.total.fill(0)
        for rank, (message, sizes) in enumerate(zip(packed, lengths, strict=True)):
            self._restore(kept.total, unpack(message, parts, sizes), context.of(rank))
        kept.give(grads)

    def _serve(
        self, kept: PackedGradients, grads: np.ndarray, x: np.ndarray, context: Context
    ) -> Iterator[Request]:
        """Add up this rank's part of the bucket, compress the sum, and send it to all others."""
        comm, tag, rank = self.group, self._tag(), self.group.rank
        cuts = list(itertools.starmap(slice, itertools.pairwise(even_cuts(x.size, comm.size))))
        sizes = (_sizes_within(context.sizes, cut) for cut in cuts)
        contexts = [replace(context, sizes=own, shapes=()) for own in sizes]
        totals = [kept.total[cut] for cut in cuts]
        parts = [
            self._sent(x[cut], total, of)
            for cut, total, of in zip(cuts, totals, contexts, strict=True)
        ]
        kept.forget()
        messages = list(map(pack, parts))
        received = [np.empty_like(messages[rank]) for _ in cuts]
        yield from send_to_each(comm, messages, received, tag)
        served = kept.served[cuts[rank]] if kept.served.size else np.zeros_like(totals[rank])
        for other, message in enumerate(received):
            self._unpack(served, message, parts[rank], contexts[rank].of(other))
        # Sums have random numbers of their own.
        contexts = [of.of(comm.size + server) for server, of in enumerate(contexts)]
        messages[rank] = pack(self._sent(served, totals[rank], contexts[rank]))
        with np.errstate(invalid="ignore"):
            served -= totals[rank]
        forget_if_not_finite(served)
        yield from send_to_all(comm, messages, tag + 1)
        kept.total.fill(0)
        for total, message, like, of in zip(totals, messages, parts, contexts, strict=True):
            self._unpack(total, message, like, of)
        kept.give(grads)

    def _sent(self, values: np.ndarray, total: np.ndarray, context: Context) -> Parts:
        """Compress values, and write to `total` what is restored from the parts."""
        total.fill(0)
        if not values.size:
            return ()
        parts = self._compress(values, context)
        if not is_finite(values):
            return self._showing(total, parts, context)
        self._restore(total, parts, context)
        return parts

    def _unpack(
        self, total: np.ndarray, message: np.ndarray, like: Parts, context: Context
    ) -> None:
        """Add the values restored from a message."""
        if like:
            self._restore(total, unpack(message, like, [p.size for p in like]), context)

    def _tag(self) -> int:
        """Return the first of two tags; two steps of one bucket may be pending."""
        self._started += 1
        return 2 * (self._started % MAX_REQUESTS)


def _sizes_within(sizes: tuple[int, ...], cut: slice) -> tuple[int, ...]:
    """Return the lengths of the parts of parameters within a range of all.

    >>> _sizes_within((3, 4, 5), slice(2, 7))
    (1, 4)
    """
    ends = np.cumsum(sizes)
    lengths = np.minimum(ends, cut.stop) - np.maximum(ends - sizes, cut.start)
    return tuple(lengths[lengths > 0].tolist())


def _is_float(dtype: np.dtype) -> bool:
    """Return whether a type is floating-point; NumPy's kind of those of ml_dtypes is "V"."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.type is not np.void)


def _has_schedule(comm: Communicator) -> bool:
    """Return whether a communicator's sums follow a schedule."""
    while isinstance(comm, Wrapper):
        if isinstance(comm, Scheduled):
            return True
        comm = comm.inner
    return False


def _shown(parts: object) -> str:
    if isinstance(parts, np.ndarray):
        return f"an array of shape {parts.shape}"
    if isinstance(parts, tuple):
        return f"a tuple of ({', '.join(map(_shown, parts))})"
    return f"an object of type {type(parts).__name__}"
