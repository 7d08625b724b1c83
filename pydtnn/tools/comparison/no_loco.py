"""NoLoCo: DiLoCo whose outer steps average over random pairs of ranks, without an all-reduce."""

from __future__ import annotations

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.option import option
from pydtnn.parallel.schemes.diloco import DiLoCo


def partner_of(rank: int, size: int, seed: int, step: int) -> int:
    """Return the rank that a rank is paired with in a step; itself if the last of an odd number.

    >>> [partner_of(rank, 5, 0, 1) for rank in range(5)]
    [3, 4, 2, 0, 1]
    """
    drawn = np.random.default_rng([seed, step]).permutation(size)
    place = int(np.flatnonzero(drawn == rank)[0]) ^ 1
    return int(drawn[place]) if place < size else rank


class NoLoCo(DiLoCo):
    """Each rank has its own outer parameters, which are attracted to those of a random other rank.

    Ranks step independently from their outer parameters c_i. Every `period` steps, with ``d_i = c_i
    - w_i`` and means over a pair of ranks, which is drawn anew for each outer step: ``v_i <-
    momentum v_i - rate mean(d) - pull (c_i - mean(c))``; ``c_i <- c_i + v_i``; ``w_i <- c_i``. A
    rank sends d and c to one other rank, and no rank waits for more than one. Pairs are a function
    of seed and step; of an odd number of ranks, one is alone. The mean of all c_i moves with
    heavy-ball momentum; of two ranks that do not train, the c_i approach each other if ``0 < pull <
    2 + 2 momentum``.

    The definition is that of the authors' code, which has `pull` = `rate`, as here by default;
    which values the paper's experiments have is not certain. The paper also routes activations at
    random between the stages of pipelines; this is not part of the scheme. Ranks have equal
    weights; the inner optimizer is local, and the mean of the ranks is evaluated and saved.

    Parameters
    ----------
    comm : Communicator
    period : int
        Steps from one outer step to the next.
    rate, momentum, pull : float
        The paper's beta, alpha and gamma.
    seed : int
        Of the pairs.

    Attributes
    ----------
    outer, velocity : sequence of ndarray
        c_i and v_i of each bucket.

    References
    ----------
    Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models",
    2025, arXiv 2506.10911, section 3.
    """

    momentum: float = option(0.5, at_least=0, below=1)
    pull: float = option(0.7, at_least=0)
    seed: int = option(0, at_least=0)

    def update(self, optimizer: Optimizer) -> None:
        self.step_alone(optimizer)
        self.samples = 1  # equal weights when parameters are averaged for evaluation
        if optimizer.iterations % self.period:
            return
        rank = self.comm.rank
        other = partner_of(rank, self.comm.size, self.seed, optimizer.iterations)
        for bucket, outer, velocity in zip(self.buckets, self.outer, self.velocity, strict=True):
            mine = (outer - bucket.values, outer)
            theirs = [(array.copy(), other) for array in mine]
            count = 2 * (other != rank)
            sends = [(array, other) for array in mine[:count]]
            self.comm.exchange(sends, theirs[:count]).wait()
            change, centre = (
                (own + array) / 2 for own, (array, _) in zip(mine, theirs, strict=True)
            )
            velocity *= self.momentum
            velocity -= self.rate * change + self.pull * (outer - centre)
            outer += velocity
            bucket.values[...] = outer
