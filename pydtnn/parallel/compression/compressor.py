"""A compressor: two functions, and what the library does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.compression.context import Context
from pydtnn.parallel.compression.sums import CompressedSums

Parts = tuple[np.ndarray, ...]
"""What is sent instead of a bucket's gradients: flat arrays of numbers, of any type and length."""


@dataclass(frozen=True)
class Compressor:
    """Turns gradients into something shorter and back; it is itself what `sums=` takes.

    Parameters
    ----------
    compress : callable
        ``compress(x, context)`` returns a tuple of flat arrays. `x` are the gradients of a bucket,
        (n,) float32 or float64, not empty, without padding; they cannot be written. Parts may be
        views of them; other arrays must not be written again.
    restore : callable
        ``restore(parts, out, context)`` adds what the parts mean to `out` (n,), of the type of `x`,
        in place. Where `x` is not finite and what is restored is, floats among the parts become
        NaN, so that it shows in the sum.
    feedback : bool
        Keep what was lost and add it to the rank's next gradients: with ``x = g + e``, the parts
        are those of `x` and ``e = x - restored``, so that all of every gradient is sent in the end.
        What is rounded off when parts are added is not kept. Saved in checkpoints.
    adds : bool
        Whether the parts of all ranks may be added element by element and then be restored: an
        allreduce sums them. Otherwise each rank sends its parts to all others, and all restore them
        in the order of the ranks. Of P ranks, each sends its parts 2 (P - 1) / P or P - 1 times.
    varies : bool
        Whether the lengths of the parts differ between ranks and steps. They are then exchanged
        first, which costs one more message. Not together with `adds`.
    seed : int
        Of the random numbers; see `Context`.

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
    feedback: bool = False
    adds: bool = False
    varies: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.adds and self.varies:
            raise ValueError(
                "Compressor: parts whose length varies cannot be added element by element, but it "
                "adds and varies at the same time; leave one out"
            )

    def __call__(self, comm: Communicator) -> CompressedSums:
        """Make the sums of one rank."""
        return CompressedSums(comm, self)
