"""Slow ranks and jitter, as a file states them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path

import numpy as np

from pydtnn.kernels.reference.random import bits, stream
from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.fields import index, load, parts, positive, quantity, read, text
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.platform import Platform

Draw = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
"""Returns factors of mean 1 from two arrays of numbers in (0, 1] and a spread."""


def _lognormal(u: np.ndarray, v: np.ndarray, spread: float) -> np.ndarray:
    normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    return np.exp(spread * normal - spread**2 / 2)


def _uniform(u: np.ndarray, v: np.ndarray, spread: float) -> np.ndarray:
    return np.maximum(1 + spread * np.sqrt(3.0) * (2 * u - 1), 0.0)


def _exponential(u: np.ndarray, v: np.ndarray, spread: float) -> np.ndarray:
    return np.maximum(1 + spread * (-np.log(u) - 1), 0.0)


DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal": _lognormal,
    "uniform": _uniform,
    "exponential": _exponential,
}
"""Distributions of jitter by name."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose computation takes `factor` times as long from `begin` to `end`, in s."""

    rank: int = index()
    factor: float = positive()
    begin: float = quantity("s", default=0.0, positive=False)
    end: float = quantity("s", default=inf)


@dataclass(frozen=True)
class Jitter:
    """Random factors on the computation of every rank in every step, of mean 1.

    Attributes
    ----------
    spread : float
        Standard deviation.
    distribution : str
        A name of `DISTRIBUTIONS`.
    seed : int
    """

    spread: float = positive()
    distribution: str = text(default="lognormal")
    seed: int = index(default=0)

    def factors(self, step: int, ranks: np.ndarray) -> np.ndarray:
        """Return the factor of each rank in a step."""
        words = bits(self.seed, stream("jitter"), step, ranks, 2)
        u, v = ((words.astype(float) + 1) / 2.0**32).T
        return DISTRIBUTIONS[self.distribution](u, v, self.spread)


@dataclass(frozen=True)
class Disturbances:
    """What disturbs a run.

    Attributes
    ----------
    stragglers : tuple of Straggler
    jitter : tuple of Jitter
        Their factors are multiplied.
    source : str
        Name of the file, for errors.
    """

    stragglers: tuple[Straggler, ...] = parts(Straggler)
    jitter: tuple[Jitter, ...] = parts(Jitter)
    source: str = text(default="")

    @classmethod
    def load(cls, path: str | Path) -> Disturbances:
        """Read a YAML file.

        Raises
        ------
        ValueError
            If the file is invalid.
        OSError
            If it cannot be read.
        """
        path = Path(path)
        found = replace(read(cls, load("disturbances", path), path.name), source=path.name)
        for one in found.jitter:
            check(found.source, "distribution", one.distribution, DISTRIBUTIONS)
        for slow in found.stragglers:
            if slow.end <= slow.begin:
                raise ValueError(
                    f"{found.source}: expected an end after the begin {slow.begin:g} s, got "
                    f"{slow.end:g} s; exchange them"
                )
        return found

    def on(self, platform: Platform, ranks: int) -> Disturbances:
        """Return these disturbances, and the ranks of a platform that are always slower."""
        slower = tuple(Straggler(*one) for one in platform.factors(ranks).items())
        return replace(self, stragglers=(*self.stragglers, *slower)) if slower else self

    def check(self, network: Network) -> None:
        """Raise ValueError if a rank is not one of a network."""
        ranks = len(network.hosts)
        for rank in (slow.rank for slow in self.stragglers):
            if rank >= ranks:
                raise ValueError(
                    f"{self.source}: expected a rank from 0 to {ranks - 1}, got {rank}; correct it"
                )

    def factor(self, time: float, step: int, rank: int) -> float:
        """Return the factor on the computation of a rank at a time."""
        slow = (s.factor for s in self.stragglers if s.rank == rank and s.begin <= time < s.end)
        jitter = (float(one.factors(step, np.array([rank]))[0]) for one in self.jitter)
        return prod((*slow, *jitter))


NONE = Disturbances()
"""No disturbances."""
