"""Kinds of cases: awkward sizes, and numbers without surprises.

A case draws arrays, says which type each has beside elements of a type, and calls a kernel of a
backend that writes to some of them. Numbers are multiples of 1/16, so that they are the same in
every type of 16 bits, and what decides about a sign (`gate`, `max_forward`) is not nearly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import PoolGeometry
from pydtnn.kernels.dtypes import arithmetic

Arrays = dict[str, Any]
SHAPES = (
    *((0, 4), (1, 1), (7, 1), (5, 3), (70, 16), (257, 17), (3000, 8), (200, 300), (20, 2000)),
    (2, 9001),
)
"""Rows and channels: none, one, primes, less and more than a vector, several parts and blocks."""

IMAGES = ((2, 7, 5, 3), (3, 9, 9, 64), (40, 12, 12, 64))
LOSSES = ((0, 3), (1, 1), (7, 3), (9, 10), (3, 17), (3, 1001), (70, 64), (2, 9000), (3000, 11))
PRODUCTS = (  # batch, inputs, outputs
    *((1, 1, 1), (0, 5, 7), (1, 37, 53), (2, 784, 10), (7, 13, 11), (16, 16, 16), (64, 70, 10)),
    *((65, 512, 32), (113, 47, 257), (600, 3, 1030), (70, 811, 230), (31, 6, 7)),
)
"""None, one, primes; rows a power of two apart; more samples and outputs than a block; rows and
columns that are cut otherwise for every number of threads."""

UNEVEN = 1.0123456789
"""Factor of elements and tables of float32 and float64, so that they need all of their digits. It
is the same for all, and so near to 1 that it turns no sign of a sum."""


class Case(NamedTuple):
    """A call of a kernel.

    Parameters
    ----------
    arrays : dict
        All arrays in float64. The first letter of a name says what type it has: x the elements', t
        (tables) that of their arithmetic, d float64, s float64 (a number), i int64, b uint8.
    run : callable
        ``run(backend, arrays)``; returns a number or None.
    """

    arrays: Arrays
    run: Callable[[Any, Arrays], Any]

    def typed(self, dtype: str) -> Arrays:
        """The arrays beside elements of a type."""
        uneven = 1.0 if np.dtype(dtype).itemsize == 2 else UNEVEN
        return {
            name: np.array(a * uneven if name[0] in "xt" else a, type_of(name, dtype))
            for name, a in self.arrays.items()
        }


def type_of(name: str, dtype: str) -> str:
    """Type of an array by its name, see `Case`."""
    others = {"d": "float64", "s": "float64", "i": "int64", "b": "uint8"}
    return {"x": dtype, "t": arithmetic(dtype).name, **others}[name[0]]


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Odd multiples of 1/16 between -2 and 2."""
    return (2 * rng.integers(-16, 16, shape) + 1) / 16.0


def table(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/8."""
    return rng.integers(-8, 9, shape) / 8.0


def blank(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan)


def columns(
    run: Callable[[Any, Arrays], Any],
    outputs: Callable[[int, int], Arrays] = lambda rows, channels: {},
) -> Callable[[np.random.Generator], Any]:
    """Cases over (rows, channels) with x, dy, tables and more outputs."""

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
                **outputs(rows, channels),
            }
            yield Case(arrays, run)

    return make


def flat(run: Callable[[Any, Arrays], Any]) -> Callable[[np.random.Generator], Any]:
    """Cases over flat arrays x, y, z and out, above 0."""

    def make(rng: np.random.Generator) -> Any:
        for n in (0, 1, 3, 17, 1024, 5003, 70001):
            names = ("x", "x y", "x z", "x out")
            arrays = {name: np.abs(draw(rng, n)) + 0.5 for name in names}
            steering = {"s lr": np.array([0.125]), "s step": np.array([3.0]), "d go": np.ones(1)}
            yield Case({**arrays, **steering, "d scale": np.array([8.0])}, run)

    return make


def loss(run: Callable[..., Any], *, classes: bool) -> Callable[[np.random.Generator], Any]:
    """Cases of ``run(backend, y, target, scale, out=)``."""
    target = "i target" if classes else "x target"

    def make(rng: np.random.Generator) -> Any:
        for rows, outputs in LOSSES:
            wanted = rng.integers(0, outputs, rows) if classes else abs(table(rng, rows, outputs))
            arrays = {
                "x": draw(rng, rows, outputs),
                target: wanted,
                "s scale": np.array([0.125]),
                "x out": blank(rows, outputs),
            }
            yield Case(
                arrays,
                lambda b, a: run(b.loss, a["x"], a[target], a["s scale"], out=a["x out"]),
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


def products(run: Callable[[Any, Arrays], Any]) -> Callable[[np.random.Generator], Any]:
    """Cases of fully connected layers of several samples, inputs and outputs."""

    def make(rng: np.random.Generator) -> Any:
        for batch, inputs, outputs in PRODUCTS:
            arrays = {
                "x": draw(rng, batch, inputs),
                "x w": draw(rng, outputs, inputs),
                "x dy": draw(rng, batch, outputs),
                "t b": table(rng, outputs),
                "x y": blank(batch, outputs),
                "x dx": blank(batch, inputs),
                "t dw": blank(outputs, inputs),
                "t more": table(rng, outputs, inputs),
                "t db": blank(outputs),
                "i rows": rng.integers(0, outputs, batch),
                "x rows": blank(batch, inputs),
            }
            yield Case(arrays, run)

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
