"""Kinds of cases: awkward sizes, and numbers without surprises.

A case draws arrays, says which type each has beside elements of a type, and calls a kernel of a
backend that writes to some of them. Numbers are multiples of 1/16, so that they are the same in
every type, and what decides about a sign (`gate`, `max_forward`) is not nearly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import PoolGeometry

Arrays = dict[str, Any]
SHAPES = ((1, 1), (5, 3), (70, 16), (3000, 8), (200, 300), (513, 64), (40, 2000))
IMAGES = ((2, 7, 5, 3), (3, 9, 9, 64), (40, 12, 12, 64))


class Case(NamedTuple):
    """A call of a kernel.

    Parameters
    ----------
    arrays : dict
        All arrays in float64. The first letter of a name says what type it has: x the elements', t
        (tables) that of their arithmetic, d float64, i int64, b uint8.
    run : callable
        ``run(backend, arrays)``; returns a number or None.
    """

    arrays: Arrays
    run: Callable[[Any, Arrays], Any]


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Odd multiples of 1/16 between -2 and 2."""
    return (2 * rng.integers(-16, 16, shape) + 1) / 16.0


def table(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/8."""
    return rng.integers(-8, 9, shape) / 8.0


def blank(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan)


def columns(
    run: Callable[[Any, Arrays], Any], outputs: Callable[[int], Arrays]
) -> Callable[[np.random.Generator], Any]:
    """Cases over (rows, channels) with x, dy and tables u, v, w, whose outputs are given."""

    def make(rng: np.random.Generator) -> Any:
        for rows, channels in SHAPES:
            arrays = {
                "x": draw(rng, rows, channels) + 3,
                "x dy": draw(rng, rows, channels),
                "d a": table(rng, channels),
                "d b": table(rng, channels),
                "t gamma": table(rng, channels),
                "t beta": table(rng, channels),
                "x out": np.zeros((rows, channels)),
                **outputs(channels),
            }
            yield Case(arrays, run)

    return make


def flat(run: Callable[[Any, Arrays], Any]) -> Callable[[np.random.Generator], Any]:
    """Cases over flat arrays x, y, z and out, above 0."""

    def make(rng: np.random.Generator) -> Any:
        for n in (1, 7, 1024, 5003, 70001):
            names = ("x", "x y", "x z", "x out")
            arrays = {name: np.abs(draw(rng, n)) + 0.5 for name in names}
            steering = {"d lr": np.array([0.125]), "d step": np.array([3.0]), "d go": np.ones(1)}
            yield Case({**arrays, **steering}, run)

    return make


def loss(run: Callable[..., Any], *, classes: bool) -> Callable[[np.random.Generator], Any]:
    """Cases of ``run(backend, y, target, scale, out=)``."""
    target = "i target" if classes else "x target"

    def make(rng: np.random.Generator) -> Any:
        for rows, outputs in ((1, 1), (9, 10), (3, 1001), (70, 64), (2, 9000), (3000, 8)):
            wanted = rng.integers(0, outputs, rows) if classes else abs(table(rng, rows, outputs))
            arrays = {
                "x": draw(rng, rows, outputs),
                target: wanted,
                "d scale": np.array([0.125]),
                "x out": blank(rows, outputs),
            }
            yield Case(
                arrays,
                lambda b, a: run(b.loss, a["x"], a[target], a["d scale"], out=a["x out"]),
            )

    return make


def images(run: Callable[[Any, Arrays, PoolGeometry], None]) -> Callable[..., Any]:
    def make(rng: np.random.Generator) -> Any:
        for n, height, width, channels in IMAGES:
            geometry = PoolGeometry((height, width), (3, 2), (2, 2), ((1, 1), (0, 1)), channels)
            outputs = (n, *geometry.output, channels)
            arrays = {
                "x": table(rng, n, height, width, channels),
                "x dy": table(rng, *outputs),
                "x y": blank(*outputs),
                "x dx": blank(n, height, width, channels),
                "b index": np.zeros(outputs),
                "x bins": table(rng, n, 3, 2, channels),
            }
            yield Case(arrays, lambda b, a, g=geometry: run(b, a, g))

    return make


def steering(run: Callable[[Any, Arrays], Any]) -> Callable[[np.random.Generator], Any]:
    """Cases of numbers that steer a step; good ones and bad."""

    def make(rng: np.random.Generator) -> Any:
        for good in (True, False):
            arrays = {
                "d totals": np.array([1.0, 2.0, 3.0 if good else np.inf]),
                "d alive": np.ones(1),
                "d go": np.ones(1) * good,
                "d scale": np.array([64.0]),
                "d good": np.array([1.0]),
                "d square": np.array(16.0 if good else 0.25),
                "d other": np.array(4.0 if good else 0.0),
            }
            yield Case(arrays, run)

    return make
