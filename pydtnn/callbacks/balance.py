"""Parts of a batch that follow the measured speed of the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydtnn.callbacks.slow_ranks import SlowRanks
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.utils.split import balanced_counts, even_cuts

_log = logging.getLogger("pydtnn.train")

SAMPLED = ("data", "forward", "loss", "backward")
"""Phases whose time is proportional to the number of samples."""

GAIN = 0.03
"""Smallest part of the time of these phases that a change must save."""

CHANGED = 0.1
"""Smallest relative change of a part from which its fixed time is computed."""

MOST, LEAST = 2.0, 0.25
"""Limits of a rank's part, relative to equal ones: its memory grows with it."""


class Balance(Callback):
    """Divide each batch among the ranks by their speed, after each epoch.

    The speed of a rank is the number of its samples over the time of the phases that process them,
    as `SlowRanks` has measured it in the epoch, without waiting for other ranks; once parts have
    changed, time that does not depend on them is known. The parts change if that saves at least 3 %
    of the time, and the logger "pydtnn.train" reports them. The global
    batch and the gradient, the mean over all its samples, remain. In exact training, ranks have
    other numbers of the same shards, so that the bytes of all results remain, too.

    Parameters
    ----------
    slow : SlowRanks
        Must precede this object among the callbacks.
    """

    reads_gradients = False

    def __init__(self, slow: SlowRanks) -> None:
        self.slow = slow
        self._places: list[int] = []
        self._shares: tuple[int, ...] | None = None
        self._latest: tuple[int, ...] | None = None
        self._before: Epoch | None = None

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Check the scheme. Collective: all ranks call it.

        Raises
        ------
        ValueError
            On all ranks, if it does not sum gradients in every step.
        """
        if why := why_not("balance", trainer.setup):
            raise ValueError(f"Balance: {why}")
        self._places = trainer.comm.gather_object(trainer.setup.data.rank)
        self._before = None  # there may be fewer ranks

    def on_epoch_start(self, trainer: Training) -> None:
        """Continue with the parts of a checkpoint, if they are those of as many ranks."""
        shares, self._shares = self._shares, None
        size, total = trainer.setup.data.size, _total(trainer)
        if shares is not None and (len(shares), sum(shares)) == (size, total):
            trainer.shares = shares
        if trainer.shares is not None and sum(trainer.shares) != total:
            trainer.shares = self._before = None  # of an earlier `fit` with another batch

    def on_epoch_end(self, trainer: Training) -> None:
        """Divide the batches of the next epochs. The same on all ranks, without communication."""
        size, total = trainer.setup.data.size, _total(trainer)
        even = tuple(b - a for a, b in pairwise(even_cuts(total, size)))
        times = times_of_places(self.slow.everywhere, self._places)
        epoch = Epoch(trainer.shares or even, tuple(times))
        new = divide(epoch, self._before)
        if new is not None:
            trainer.shares, self._before = new, epoch
            if trainer.comm.rank == 0:
                what = "samples" if trainer.setup.exchange.sums.shards is None else "shards"
                parts = ", ".join(map(str, new))
                _log.warning("epoch %d: %s of the ranks in a batch: %s", trainer.epoch, what, parts)
        self._latest = trainer.shares

    def state(self) -> dict[str, Any]:
        """Return the parts of the ranks."""
        return {"shares": None if self._latest is None else [*self._latest]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`.

        Raises
        ------
        ValueError
            If the parts are no numbers of at least 1; nothing is changed.
        """
        shares = state["shares"]
        if shares is not None:
            if not isinstance(shares, list) or not all(type(n) is int and n > 0 for n in shares):
                raise ValueError(f"Balance: shares must be positive numbers, got {shares!r:.100}")
            shares = tuple(shares)
        self._shares = self._latest = shares


def _total(trainer: Training) -> int:
    """Return what is divided in a batch: shards in exact training, otherwise samples."""
    return trainer.setup.exchange.sums.shards or trainer.global_batch_size


def times_of_places(
    everywhere: Sequence[Mapping[str, float]], places: Sequence[int]
) -> list[float]:
    """Return the time of each place along the axis of the data, that of its slowest rank.

    Parameters
    ----------
    everywhere : sequence of mapping of str to float
        Time of each phase on each rank, in s.
    places : sequence of int
        Place of each rank.
    """
    times = [0.0] * (max(places) + 1)
    for own, place in zip(everywhere, places, strict=True):
        times[place] = max(times[place], sum(own.get(name, 0.0) for name in SAMPLED))
    return times


@dataclass(frozen=True)
class Epoch:
    """What was measured in an epoch.

    Attributes
    ----------
    shares : tuple of int
        The parts of the ranks.
    times : tuple of float
        In which they were processed, in s.
    """

    shares: tuple[int, ...]
    times: tuple[float, ...]


def divide(now: Epoch, before: Epoch | None = None) -> tuple[int, ...] | None:
    """Return other parts of the ranks, or None if they would not save enough.

    Parameters
    ----------
    now, before : Epoch
        The last epoch, and an earlier one with other parts. From both follows how much of the time
        of a rank is fixed, such as that of reading the weights; by default none is.

    Examples
    --------
    >>> divide(Epoch((16, 16, 16, 16), (1.0, 1.0, 1.0, 2.0)))
    (19, 18, 18, 9)
    """
    if min(now.times) <= 0:
        return None
    total, size = sum(now.shares), len(now.shares)
    lines = []
    for rank, (share, time) in enumerate(zip(now.shares, now.times, strict=True)):
        each = time / share
        if before is not None and abs(before.shares[rank] - share) >= CHANGED * share:
            slope = (before.times[rank] - time) / (before.shares[rank] - share)
            each = min(max(slope, 0.0), each)
        lines.append((time - each * share, each))
    least, most = max(int(LEAST * total / size), 1), -int(-MOST * total // size)
    new = balanced_counts(total, lines, least, most)
    expected = max(fixed + each * share for share, (fixed, each) in zip(new, lines, strict=True))
    return tuple(new) if expected < (1 - GAIN) * max(now.times) else None
