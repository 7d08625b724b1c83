"""Every kernel with something to compute: awkward sizes, and numbers without surprises.

A case draws arrays, whose names say which type each has beside elements of a type, and calls a
kernel of a backend that writes to some of them. Numbers are multiples of 1/16, so that they are
the same in every type of 16 bits, and what decides about a sign is not nearly 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import ConvGeometry, Deferred, PoolGeometry, Term
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.attention import At, AttentionDropout
from pydtnn.kernels.reference.elementwise import ACTIVATIONS
from pydtnn.kernels.reference.norm import NormGradient

Arrays = dict[str, Any]
Drawn = Iterator[tuple[Arrays, dict[str, Any]]]

SHAPES = (
    *((0, 4), (1, 1), (7, 1), (5, 3), (70, 16), (257, 17), (3000, 8), (200, 300), (20, 2000)),
    (2, 9001),
)
"""Rows and channels: none, one, primes, less and more than a vector, several parts and blocks."""

SIZES = (0, 1, 3, 17, 1024, 5003, 70001)
IMAGES = tuple(
    (n, PoolGeometry(size, (3, 2), (2, 2), ((1, 1), (0, 1)), channels), (3, 2))
    for n, size, channels in ((2, (7, 5), 3), (3, (9, 9), 64), (40, (12, 12), 64))
)
"""Samples, geometries and bins of adaptive pooling."""

LOSSES = ((0, 3), (1, 1), (7, 3), (9, 10), (3, 17), (3, 1001), (70, 64), (2, 9000), (3000, 11))
PRODUCTS = (  # batch, inputs, outputs
    *((1, 1, 1), (0, 5, 7), (1, 37, 53), (2, 784, 10), (7, 13, 11), (16, 16, 16), (64, 70, 10)),
    *((65, 512, 32), (113, 47, 257), (600, 3, 1030), (70, 811, 230), (31, 6, 7)),
)
"""None, one, primes; rows a power of two apart; more samples and outputs than a block; rows and
columns that are cut otherwise for every number of threads."""

GROUPS = (
    *(((3, 7, 8), 2), ((9, 1, 50), 1), ((2, 300, 6), 1), ((5, 3, 64), 4), ((2, 1, 9000), 1)),
    ((40, 5, 24), 3),
)
HEADS = ((1, 1, 1, 1), (0, 5, 2, 3), (3, 20, 2, 4), (2, 57, 3, 17))
"""Samples, positions, heads and elements of a head."""

UNEVEN = 1.0123456789
"""Factor of elements and tables of float32 and float64, so that they need all of their digits. It
is the same for all, and so near to 1 that it turns no sign of a sum."""


class Case(NamedTuple):
    """Calls of a kernel.

    Parameters
    ----------
    kernel : str
        With its family.
    arrays : dict
        All arrays in float64. The first letter of a name says what type it has: x the elements', t
        (tables) that of their arithmetic, d float64, s float64 (a number), i int64, b uint8.
    constants : dict
        Other arguments by name, or functions of the arrays.
    calls : list of (arguments, options)
        Names of arrays and constants stand for these.
    """

    kernel: str
    arrays: Arrays
    constants: dict[str, Any]
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]

    def typed(self, dtype: str) -> Arrays:
        """The arrays beside elements of a type."""
        uneven = 1.0 if np.dtype(dtype).itemsize == 2 else UNEVEN
        kinds = {"x": dtype, "t": arithmetic(dtype).name, "i": "int64", "b": "uint8"}
        return {
            name: np.array(a * uneven if name[0] in "xt" else a, kinds.get(name[0], "float64"))
            for name, a in self.arrays.items()
        }

    def run(self, backend: Any, arrays: Arrays) -> Any:
        """Make the calls; return the sum of what they return, or None."""

        def value(given: Any) -> Any:
            if not isinstance(given, str):
                return given
            found = arrays.get(given, self.constants.get(given, given))
            return found(arrays) if callable(found) else found

        results = []
        for args, options in self.calls:
            family, kernel = options.get("kernel", self.kernel).split(".")
            named = {name: value(one) for name, one in options.items() if name != "kernel"}
            results.append(getattr(getattr(backend, family), kernel)(*map(value, args), **named))
        return None if results[-1] is None else sum(results[1:], results[0])


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Odd multiples of 1/16 between -2 and 2."""
    return (2 * rng.integers(-16, 16, shape) + 1) / 16.0


def table(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/8."""
    return rng.integers(-8, 9, shape) / 8.0


def blank(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan)


# -- arrays ----------------------------------------------------------------------------------------


def columns(rng: np.random.Generator) -> Drawn:
    for rows, channels in SHAPES:
        tables = ("d a", "d b", "t gamma", "t beta")
        yield (
            {
                **{"x": draw(rng, rows, channels) + 3, "x dy": draw(rng, rows, channels)},
                **{name: table(rng, channels) for name in tables},
                **{"x out": blank(rows, channels), "t dgamma": blank(channels)},
                **{"d sums": blank(1 + 2 * channels), "d collect": np.ones(1 + 2 * channels)},
                **{"d dsums": blank(2, channels), "d more": np.ones((2, channels))},
                **{"d moments": blank(2, channels), "t map": blank(3, channels)},
                **{"d inv": blank(rows, 1), "d given": np.full((rows, 1), 0.75)},
            },
            {},
        )


def flat(rng: np.random.Generator) -> Drawn:
    """Above 0, and z of both signs: odd multiples of 1/4, which are no corners of a function."""
    for n in SIZES:
        arrays = {name: np.abs(draw(rng, n)) + 0.5 for name in ("x", "x y", "x z", "x out")}
        steering = {"s lr": np.array([0.125]), "s step": np.array([3.0]), "d go": np.ones(1)}
        yield {**arrays, **steering, "d scale": np.array([8.0])}, {}


def activated(rng: np.random.Generator) -> Drawn:
    for n in SIZES:
        z = 4 * draw(rng, n)  # odd multiples of 1/4, which are no corners of a function
        outputs = {f"x {name}": blank(n) for name in ACTIVATIONS}
        yield {"x": draw(rng, n), "x z": z, "x positive": abs(z), **outputs}, {}


def converted(rng: np.random.Generator) -> Drawn:
    for n in SIZES:
        yield {"x": draw(rng, n), "d wide": blank(n), "t narrow": draw(rng, n)}, {}


def losses(rng: np.random.Generator) -> Drawn:
    for rows, outputs in LOSSES:
        yield (
            {
                "x": draw(rng, rows, outputs),
                "i class": rng.integers(0, outputs, rows),
                "x target": abs(table(rng, rows, outputs)),
                "t weights": abs(table(rng, outputs)),
                "s scale": np.array([0.125]),
                **{"x out": blank(rows, outputs), "x second": blank(rows, outputs)},
            },
            {},
        )


def images(rng: np.random.Generator) -> Drawn:
    for n, geometry, bins in IMAGES:
        inputs, outputs = ((n, *s, geometry.channels) for s in (geometry.size, geometry.output))
        binned = (n, *bins, geometry.channels)
        yield (
            {
                **{"x": table(rng, *inputs), "x dy": table(rng, *outputs)},
                **{"x y": blank(*outputs), "x dx": blank(*inputs), "b index": np.zeros(outputs)},
                **{"x second": blank(*outputs), "x gradient": blank(*inputs)},
                **{"x dbins": table(rng, *binned), "x bins": blank(*binned)},
            },
            {"geometry": geometry},
        )


def products(rng: np.random.Generator) -> Drawn:
    for batch, inputs, outputs in PRODUCTS:
        yield (
            {
                **{"x": draw(rng, batch, inputs), "x w": draw(rng, outputs, inputs)},
                **{"x dy": draw(rng, batch, outputs), "t b": table(rng, outputs)},
                **{"x y": blank(batch, outputs), "x dx": blank(batch, inputs)},
                **{"t dw": blank(outputs, inputs), "t more": table(rng, outputs, inputs)},
                "i rows": rng.integers(0, outputs, batch),
            },
            {},
        )


def steering(rng: np.random.Generator) -> Drawn:
    """Numbers that steer a step; good ones and bad."""
    for good in (True, False):
        yield (
            {
                "d totals": np.array([1.0, 2.0, 3.0 if good else np.inf]),
                **{"d alive": np.ones(1), "d go": np.ones(1) * good},
                **{"d scale": np.array([64.0]), "d good": np.array([1.0])},
                **{"d square": np.array(16.0 if good else 0.25), "d other": np.array(4.0 * good)},
            },
            {},
        )


def deferred(a: Arrays, terms: int, relu: bool = True, limit: float = inf) -> Deferred:
    first = Term(a["x0"], a["t pivot"], a["t factor"])
    second = Term(a["x1"], a.get("t second"))
    return Deferred(first, *[second][: terms - 1], shift=a["t shift"], relu=relu, limit=limit)


def fused(rng: np.random.Generator, limit: float = inf) -> Drawn:
    for rows, channels in SHAPES:
        for terms, *bounds in ((1, False), (1, True), (2, True, limit)):
            names = ("t pivot", "t second", "t gamma")
            arrays = {
                **{n: table(rng, rows, channels) for n in ("x0", "x1", "x dy", "x add")},
                **{name: table(rng, channels) for name in names},
                "t factor": 2.0 ** rng.integers(-1, 2, channels),
                "t shift": draw(rng, channels) / 2,  # the sum is no multiple of 1/16: not 0
                **{"d moments": table(rng, 2, channels), "s rows": np.array([7.0])},
                **{f"t grads {i}": table(rng, 2, channels) for i in range(terms)},
                **{f"t map {i}": blank(3, channels) for i in range(terms)},
                **{"x out": blank(rows, channels), "d sums": blank(1 + terms, channels)},
            }

            def norms(a: Arrays, terms: int = terms) -> list[NormGradient]:
                given = a["d moments"], a["t gamma"]
                return [
                    NormGradient(
                        [7, a["s rows"]][i], *given, *a[f"t grads {i}"], a[f"t map {i}"], i == 0
                    )
                    for i in range(terms)
                ]

            yield arrays, {"value": lambda a, n=(terms, *bounds): deferred(a, *n), "norms": norms}


def maps(rng: np.random.Generator) -> Drawn:
    for channels in (1, 300):
        sums = np.abs(table(rng, 1 + 2 * channels)) + 100
        names = ("pivot", "gamma", "beta", "dbeta")
        yield (
            {
                "d sums": np.concatenate([[50], sums[1 : 1 + channels], 9 * sums[1 + channels :]]),
                **{"d dsums": table(rng, 2, channels), "s rows": np.array([7.0])},
                **{"d own": blank(2, channels), "d moments": table(rng, 2, channels)},
                **{f"t {name}": table(rng, channels) for name in names},
                **{"t map": blank(3, channels), "d collect": np.ones(1 + 2 * channels)},
                **{"t out": blank(3, channels), "t dg": blank(channels), "t db": blank(channels)},
            },
            {},
        )


def folded(rng: np.random.Generator) -> Drawn:
    own = np.arange(700)
    yield (
        {
            "d sums": np.abs(table(rng, 1401)) + np.where(np.arange(1401) > 700, 99, 5),
            "d running": table(rng, 1400),
            "i indices": np.stack([0 * own, own + 1, own + 701]),
            "d momentum": np.abs(table(rng, 700)),
        },
        {},
    )


def grouped(rng: np.random.Generator) -> Drawn:
    for shape, groups in GROUPS:
        names = ("t gamma", "t beta", "t dgamma", "t dbeta")
        yield (
            {
                **{"x": draw(rng, *shape) + 3, "x dy": draw(rng, *shape), "x out": blank(*shape)},
                **{name: table(rng, shape[2]) for name in names},
                "d mean": 3 + table(rng, shape[0], groups) / 8,
                "d inv_std": 1 + np.abs(table(rng, shape[0], groups)),
                **{"t dg": blank(shape[2]), "t db": blank(shape[2])},
            },
            {"groups": groups},
        )


def dropped(rng: np.random.Generator) -> Drawn:
    for shape in ((0, 5), (3,), (2, 3), (3, 5, 7), (70, 16, 4), (3, 5000), (9, 8192)):
        samples = 3 * np.arange(shape[0]) + 2**33
        yield {"x": draw(rng, *shape), "i samples": samples, "x out": blank(*shape)}, {}


def attention(rng: np.random.Generator) -> Drawn:
    for n, length, heads, width in HEADS:
        size, whole, block = ((n, length, k * heads * width) for k in (1, 3, 2))
        block = (n, 9, block[2])
        yield (
            {
                **{f"x {name}": draw(rng, *size) for name in ("q", "y", "dy")},
                **{"x qkv": draw(rng, *whole), "x kv": draw(rng, *block)},
                **{f"x {name}": blank(*size) for name in ("out", "dq", "block")},
                **{"x dqkv": blank(*whole), "x dkv": blank(*block)},
                "t log": 3 + table(rng, n, heads, length),
                **{f"t {name}": blank(n, heads, length) for name in ("sums", "block")},
            },
            {
                "heads": heads,
                "at": At(5, 2, 90),
                "dropout": AttentionDropout(0.25, 1, 2, 3, np.arange(n)),
            },
        )


def convolution(rng: np.random.Generator) -> Drawn:
    g = ConvGeometry((5, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4, 6, 2)
    x, y, w = (3, *g.size, 4), (3, *g.output, 6), g.weight_shape
    constants = {"value": lambda a: deferred(a, 2), "scratch": lambda a: np.empty_like(a["x y"])}
    yield (
        {
            **{name: table(rng, *x) for name in ("x0", "x1", "x", "x add")},
            **{"x w": table(rng, *w), "x dy": draw(rng, *y), "t b": table(rng, 6)},
            **{"t pivot": table(rng, 4), "t factor": table(rng, 4), "t shift": draw(rng, 4) / 2},
            **{"x y": blank(*y), "x store": blank(*x), "x dx": blank(*x), "x gated": blank(*x)},
            **{"t dw": blank(*w), "t more": table(rng, *w)},
        },
        {"geometry": g, **constants},
    )


# -- calls -----------------------------------------------------------------------------------------


def call(*args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, options


RULE = {"lr": "s lr", "decay": 0.125}
BETAS = {"beta1": 0.75, "beta2": 0.9375, "epsilon": 1e-3}
SCHEDULE = {"mu": 0.75, "mu_next": 0.8125, "mu_product": 0.5}
GIVEN = ("d dsums", "s rows", "d moments", "t pivot", "t gamma")
GROUP = ("x", "x dy", "t gamma", "groups", "d mean", "d inv_std")
W, WV, WMV = ("x", "x y"), ("x", "x y", "x z"), ("x", "x y", "x z", "x out")
MAXIMUM = call("x", "geometry", out="x y", index="b index", kernel="pool.max_forward")
COUNTED = {"count_padding": False}


def activation(name: str, *args: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    z = "x positive" if name == "log" else "x z"
    return call(name, *args, z, out=f"x {name}", alpha=0.25)


MAKERS: dict[str, Any] = {
    "fused.evaluate": (fused, call("value", out="x out")),
    "fused.gate": (
        fused,
        call("x dy", "value", out="x out"),
        call("x dy", "value", out="x add", sums="d sums", add="x add"),
    ),
    "fused.gate_norms": (fused, call("x dy", "value", "norms", out="x out", sums="d sums")),
    "norm.statistics": (
        columns,
        call("x", out="d sums"),
        call("x", out="d collect", accumulate=True),
    ),
    "norm.statistics_coefficients": (
        columns,
        call(
            *("x", "t gamma", "t beta", 1e-5),
            **{"sums": "d sums", "moments": "d moments", "out": "t map", "collect": "d collect"},
        ),
    ),
    "norm.normalize": (columns, call("x", "d a", "d b", out="x out")),
    "norm.backward_statistics": (
        columns,
        call("x", "x dy", "d a", "d b", out="d dsums"),
        call("x", "x dy", "d a", "d b", out="d more", accumulate=True),
    ),
    "norm.backward_normalize": (columns, call("x", "x dy", "d a", "d b", "d a", out="x out")),
    "norm.coefficients": (
        maps,
        call("d sums", "t gamma", "t beta", 1e-5, moments="d own", out="t map"),
        call(
            *("d sums", "t gamma", "t beta", 1e-5),
            **{"moments": "d own", "out": "t out", "collect": "d collect"},
        ),
    ),
    "norm.backward_coefficients": (
        maps,
        call(*GIVEN, dgamma="t dg", dbeta="t db", out="t out"),
        call(*GIVEN, dgamma="t beta", dbeta="t dbeta", out="t out", accumulate=True),
    ),
    "norm.fold": (folded, call("d sums", "d running", "i indices", "d momentum")),
    "norm.group_forward": (
        grouped,
        call(
            *("x", "t gamma", "t beta", "groups", 1e-5),
            **{"out": "x out", "mean": "d mean", "inv_std": "d inv_std"},
        ),
    ),
    "norm.group_backward": (
        grouped,
        call(*GROUP, out="x out", dgamma="t dg", dbeta="t db"),
        call(*GROUP, out="x out", dgamma="t dgamma", dbeta="t dbeta", accumulate=True),
    ),
    "elementwise.forward": (activated, *(activation(name) for name in ACTIVATIONS)),
    "elementwise.backward": (activated, *(activation(name, "x") for name in ACTIVATIONS)),
    "elementwise.add": (flat, call("x", "x y", out="x out")),
    "elementwise.convert": (
        converted,
        call("x", out="d wide"),
        call("x", out="t narrow", accumulate=True),
    ),
    "elementwise.softmax_forward": (columns, call("x", out="x out")),
    "elementwise.softmax_backward": (columns, call("x dy", "x", out="x out")),
    "linear.forward": (products, call("x", "x w", "t b", out="x y")),
    "linear.backward_data": (products, call("x dy", "x w", out="x dx")),
    "linear.backward_filter": (
        products,
        call("x", "x dy", out="t dw"),
        call("x", "x dy", out="t more", accumulate=True),
    ),
    "linear.backward_bias": (
        columns,
        call("x dy", out="t dgamma"),
        call("x dy", out="t beta", accumulate=True),
    ),
    "loss.cross_entropy": (losses, call("x", "i class", 0.125, "s scale", out="x out")),
    "loss.hinge": (losses, call("x", "i class", "s scale", out="x out")),
    "loss.binary_cross_entropy": (losses, call("x", "x target", "s scale", out="x out")),
    "loss.squared_error": (losses, call("x", "x target", "s scale", out="x out")),
    "loss.absolute_error": (losses, call("x", "x target", "s scale", out="x out")),
    "pool.max_forward": (images, MAXIMUM),
    "pool.max_backward": (images, MAXIMUM, call("x dy", "b index", "geometry", out="x dx")),
    "pool.average_forward": (
        images,
        call("x", "geometry", out="x y"),
        call("x", "geometry", out="x second", **COUNTED),
    ),
    "pool.average_backward": (
        images,
        call("x dy", "geometry", out="x dx"),
        call("x dy", "geometry", out="x gradient", **COUNTED),
    ),
    "pool.adaptive_forward": (images, call("x", out="x bins")),
    "pool.adaptive_backward": (images, call("x dbins", out="x dx")),
    "random.dropout": (dropped, call("x", 0.25, 2**32 + 11, 7, 5, "i samples", out="x out")),
    "update.sgd": (
        flat,
        call(*W, None, momentum=0.0, nesterov=False, **RULE),
        *(call(*WV, momentum=0.5, nesterov=nesterov, **RULE) for nesterov in (False, True)),
    ),
    "update.rmsprop": (flat, call(*WV, rho=0.5, epsilon=1e-3, **RULE)),
    "update.adam": (
        flat,
        *(call(*WMV, step="s step", decoupled=way, **RULE, **BETAS) for way in (False, True)),
    ),
    "update.nadam": (flat, call(*WMV, step="s step", **RULE, **BETAS, **SCHEDULE)),
    "update.scale": (flat, call("x", "s lr")),
    "update.unscale": (flat, call("x", "d scale", "d go")),
    "update.squared_norm": (flat, call("x")),
    "update.watch": (steering, call("d totals", "d alive", "d go")),
    "update.rescale": (steering, call("d scale", "d good", "d go", interval=2)),
    "update.clip_factor": (steering, call("d square", 2.0)),
    "update.trust": (steering, call("d square", "d square", "d other", factor=0.5, decay=0.25)),
}
"""Arrays and calls of each kernel that a GPU has, too; convolutions have tests of their own."""

RESPONSE = (4, 0.25, 0.75, 2.0)
RMS = ("x", "x dy", "t gamma", "d given")

OF_THE_HOST: dict[str, Any] = {
    **{name: (partial(fused, limit=0.5), *MAKERS[name][1:]) for name in MAKERS if "fused" in name},
    "linear.take_rows": (products, call("x w", "i rows", out="x dx")),
    "linear.add_rows": (
        products,
        call("x", "i rows", out="t dw"),
        call("x", "i rows", out="t more", accumulate=True),
    ),
    "norm.rms_forward": (columns, call("x", "t gamma", 1e-3, out="x out", inv_rms="d inv")),
    "norm.rms_backward": (
        columns,
        call(*RMS, out="x out", dgamma="t dgamma"),
        call(*RMS, out="x out", dgamma="t beta", accumulate=True),
    ),
    "norm.local_response_forward": (columns, call("x", *RESPONSE, out="x out")),
    "norm.local_response_backward": (columns, call("x", "x dy", *RESPONSE, out="x out")),
    "loss.weighted_cross_entropy": (
        losses,
        call("x", "i class", "t weights", 2, 0.125, "s scale", out="x out"),
        call("x", "i class", None, None, 0.0, "s scale", out="x second"),
    ),
    "update.adagrad": (flat, call(*WV, initial=0.125, epsilon=1e-3, **RULE)),
    "update.lion": (flat, call(*WV, beta1=0.75, beta2=0.5, **RULE)),
    "attention.forward": (
        attention,
        call("x qkv", "heads", out="x out", log_sums="t sums"),
        call("x q", "heads", out="x block", log_sums="t block", kv="x kv", at="at"),
    ),
    "attention.backward": (
        attention,
        call("x dy", "x qkv", "x y", "t log", "heads", out="x dqkv", dropout="dropout"),
        call(
            *("x dy", "x q", "x y", "t log", "heads"),
            **{"out": "x dq", "out_kv": "x dkv", "kv": "x kv", "at": "at"},
        ),
    ),
    "conv.forward": (
        convolution,
        call("x", "x w", "t b", "geometry", out="x y", relu=True),
        call("value", "x w", None, "geometry", out="scratch", store="x store"),
    ),
    "conv.backward_data": (
        convolution,
        call("x dy", "x w", "geometry", out="x dx", add="x add"),
        call("x dy", "x w", "geometry", out="x gated", gate="value"),
    ),
    "conv.backward_filter": (
        convolution,
        call("x", "x dy", "geometry", out="t dw"),
        call("x", "x dy", "geometry", out="t more", accumulate=True),
    ),
    "conv.backward": (convolution, call("x", "x dy", "x w", "geometry", dx="x dx", dw="t dw")),
}
"""Those that the GPU has no kernels for, or that have tests of their own there."""

IN_PLACE: dict[str, tuple[str, ...]] = {
    **{
        f"fused.{name}": inputs
        for name, inputs in (("evaluate", ("x0", "x1")), ("gate", ("x dy",)))
    },
    **{"norm.normalize": ("x",), "norm.backward_normalize": ("x dy",)},
    **{"elementwise.forward": ("x z", "x positive"), "elementwise.backward": ("x",)},
    **{"elementwise.add": ("x", "x y"), "elementwise.softmax_forward": ("x",)},
    **{"elementwise.softmax_backward": ("x dy",), "random.dropout": ("x",)},
    **{kernel: ("x",) for kernel in (MAKERS | OF_THE_HOST) if kernel.startswith("loss")},
    "norm.local_response_backward": ("x dy",),
}
"""Arrays that a kernel may overwrite by its output."""

IN_PLACE_ON_GPU = [name for name in IN_PLACE if name in MAKERS and not name.startswith("loss")]
"""A GPU's losses read other elements of a row after the first ones are written."""


def in_place(kernel: str, drawn: Any) -> list[tuple[Case, str, str]]:
    """Return cases of one call each, with the names of its output and of an input it may be."""
    return [
        (case._replace(calls=(one,)), one[1]["out"], name)
        for case in cases(kernel, drawn)
        for one in case.calls
        for name in IN_PLACE[kernel]
        if "add" not in one[1]
    ]


def cases(kernel: str, drawn: np.random.Generator | list[Any]) -> list[Case]:
    """Return what there is to call of ``family.kernel``, with what its maker draws or has drawn."""
    make, *calls = (OF_THE_HOST | MAKERS)[kernel]  # those that a GPU has, too, where they differ
    used = {one for args, options in calls for one in (*args, *options.values())}
    found = []
    for arrays, constants in drawn if isinstance(drawn, list) else make(drawn):
        if not any(map(callable, constants.values())):  # which may read others
            arrays = {name: array for name, array in arrays.items() if name in used}
        found.append(Case(kernel, arrays, constants, tuple(calls)))
    return found
