"""Every kernel of our own with something to compute; see `cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.kernels import Deferred, PoolGeometry, Term
from pydtnn.kernels.reference.elementwise import ACTIVATIONS
from pydtnn.kernels.reference.norm import NormGradient
from tests.kernels.cuda.cases import (
    SHAPES,
    Arrays,
    Case,
    blank,
    columns,
    draw,
    flat,
    images,
    loss,
    steering,
    table,
)

GROUPS = (
    ((3, 7, 8), 2),
    ((9, 1, 50), 1),
    ((2, 300, 6), 1),
    ((5, 3, 64), 4),
    ((2, 1, 9000), 1),
    ((40, 5, 24), 3),
)


def cases(kernel: str, rng: np.random.Generator) -> list[Case]:
    """Return what there is to call of ``family.kernel``."""
    return list(MAKERS[kernel](rng))


def deferred(a: Arrays, terms: int) -> Deferred:
    first = Term(a["x0"], a["t pivot"], a["t factor"])
    return Deferred(first, *[Term(a["x1"])][: terms - 1], shift=a["t shift"], relu=True)


def fused(gate: bool) -> Callable[[np.random.Generator], Any]:
    def make(rng: np.random.Generator) -> Any:
        for rows, channels in SHAPES:
            for terms in (1, 2):
                shape = (rows, channels)
                arrays = {
                    **{name: table(rng, *shape) for name in ("x0", "x1", "x dy", "x add")},
                    "t pivot": table(rng, channels),
                    "t factor": 2.0 ** rng.integers(-1, 2, channels),
                    "t shift": draw(rng, channels) / 2,  # the sum is no multiple of 1/16: not 0
                    "x out": blank(*shape),
                    "d sums": blank(1 + terms, channels),
                }

                def run(b: Any, a: Arrays, terms: int = terms) -> None:
                    if not gate:
                        return b.fused.evaluate(deferred(a, terms), out=a["x out"])
                    value = deferred(a, terms)
                    b.fused.gate(a["x dy"], value, out=a["x out"])
                    b.fused.gate(a["x dy"], value, out=a["x add"], sums=a["d sums"], add=a["x add"])

                if not gate:
                    del arrays["d sums"]
                yield Case(arrays, run)

    return make


def map_of_norm(rng: np.random.Generator) -> Any:
    for channels in (1, 300):
        sums = np.abs(table(rng, 1 + 2 * channels)) + 100
        sums[0] = 50
        arrays = {
            "d sums": np.concatenate([sums[:1], sums[1 : 1 + channels], 9 * sums[1 + channels :]]),
            "t gamma": table(rng, channels),
            "t beta": table(rng, channels),
            "d moments": blank(2, channels),
            "t out": blank(3, channels),
        }

        def run(b: Any, a: Arrays) -> None:
            given = (a["d sums"], a["t gamma"], a["t beta"], 1e-5)
            b.norm.coefficients(*given, moments=a["d moments"], out=a["t out"])

        yield Case(arrays, run)


def map_of_gradient(rng: np.random.Generator) -> Any:
    for channels in (1, 300):
        arrays = {
            "d sums": table(rng, 2, channels),
            "d rows": np.array([7.0]),
            "d moments": table(rng, 2, channels),
            **{f"t {name}": table(rng, channels) for name in ("pivot", "gamma", "beta", "dbeta")},
            "t out": blank(3, channels),
        }

        def run(b: Any, a: Arrays) -> None:
            b.norm.backward_coefficients(
                *(a["d sums"], a["d rows"], a["d moments"], a["t pivot"], a["t gamma"]),
                **{"dgamma": a["t beta"], "dbeta": a["t dbeta"], "out": a["t out"]},
                accumulate=True,
            )

        yield Case(arrays, run)


def gate_norms(rng: np.random.Generator) -> Any:
    for rows, channels in SHAPES:
        for terms in (1, 2):
            shape = (rows, channels)
            arrays = {
                **{name: table(rng, *shape) for name in ("x0", "x1", "x dy")},
                **{f"t {name}": table(rng, channels) for name in ("pivot", "second", "gamma")},
                "t factor": 2.0 ** rng.integers(-1, 2, channels),
                "t shift": draw(rng, channels) / 2,  # as in `fused`
                "d moments": table(rng, 2, channels),
                "d rows": np.array([7.0]),
                **{f"t grads {i}": table(rng, 2, channels) for i in range(terms)},
                **{f"t map {i}": blank(3, channels) for i in range(terms)},
                "x out": blank(*shape),
                "d sums": blank(1 + terms, channels),
            }

            def run(b: Any, a: Arrays, terms: int = terms) -> None:
                value = Deferred(
                    Term(a["x0"], a["t pivot"], a["t factor"]),
                    *[Term(a["x1"], a["t second"])][: terms - 1],
                    shift=a["t shift"],
                    relu=True,
                )
                norms = [
                    NormGradient(
                        *([7, a["d rows"]][i], a["d moments"], a["t gamma"], *a[f"t grads {i}"]),
                        *(a[f"t map {i}"], i == 0),
                    )
                    for i in range(terms)
                ]
                b.fused.gate_norms(a["x dy"], value, norms, out=a["x out"], sums=a["d sums"])

            yield Case(arrays, run)


def fold(rng: np.random.Generator) -> Any:
    own = np.arange(700)
    arrays = {
        "d sums": np.abs(table(rng, 1401)) + np.where(np.arange(1401) > 700, 99, 5),
        "d running": table(rng, 1400),
        "i indices": np.stack([0 * own, own + 1, own + 701]),
        "d momentum": np.abs(table(rng, 700)),
    }
    yield Case(arrays, lambda b, a: b.norm.fold(*a.values()))


def group(backward: bool) -> Callable[[np.random.Generator], Any]:
    def make(rng: np.random.Generator) -> Any:
        for shape, groups in GROUPS:
            arrays = {
                "x": draw(rng, *shape) + 3,
                "x dy": draw(rng, *shape),
                "t gamma": table(rng, shape[2]),
                "t beta": table(rng, shape[2]),
                "t dgamma": table(rng, shape[2]),
                "t dbeta": table(rng, shape[2]),
                "d mean": 3 + table(rng, shape[0], groups) / 8,
                "d inv_std": 1 + np.abs(table(rng, shape[0], groups)),
                "x out": blank(*shape),
            }

            def run(b: Any, a: Arrays, groups: int = groups) -> None:
                moments = {"mean": a["d mean"], "inv_std": a["d inv_std"]}
                if not backward:
                    tables = (a["t gamma"], a["t beta"], groups, 1e-5)
                    return b.norm.group_forward(a["x"], *tables, out=a["x out"], **moments)
                b.norm.group_backward(
                    *(a["x"], a["x dy"], a["t gamma"], groups, *moments.values()),
                    **{"out": a["x out"], "dgamma": a["t dgamma"], "dbeta": a["t dbeta"]},
                    accumulate=True,
                )

            yield Case(arrays, run)

    return make


def activate(backward: bool) -> Callable[[Any, Arrays], None]:
    def run(b: Any, a: Arrays) -> None:
        for name in ACTIVATIONS:
            if backward:
                b.elementwise.backward(name, a["x"], a["x y"], out=a["x out"], alpha=0.25)
            else:
                b.elementwise.forward(name, a["x"], out=a["x out"], alpha=0.25)
            a["x z"] += a["x out"]

    return run


def convert(b: Any, a: Arrays) -> None:
    b.elementwise.convert(a["x"], out=a["d wide"])
    b.elementwise.convert(a["x y"], out=a["t narrow"], accumulate=True)


def converted(rng: np.random.Generator) -> Any:
    for n in (1, 7, 4099):
        arrays = {
            "x": draw(rng, n),
            "x y": draw(rng, n),
            "d wide": blank(n),
            "t narrow": draw(rng, n),
        }
        yield Case(arrays, convert)


def max_forward(b: Any, a: Arrays, g: PoolGeometry) -> None:
    b.pool.max_forward(a["x"], g, out=a["x y"], index=a["b index"])


def max_backward(b: Any, a: Arrays, g: PoolGeometry) -> None:
    max_forward(b, a, g)
    b.pool.max_backward(a["x dy"], a["b index"], g, out=a["x dx"])


def average(b: Any, a: Arrays, g: PoolGeometry, counted: bool = False) -> None:
    b.pool.average_forward(a["x"], g, out=a["x y"], count_padding=counted)
    b.pool.average_backward(a["x dy"], g, out=a["x dx"], count_padding=counted)


def adaptive(b: Any, a: Arrays, g: PoolGeometry) -> None:
    b.pool.adaptive_backward(a["x bins"], out=a["x dx"])
    b.pool.adaptive_forward(a["x"], out=a["x bins"])


def dropped(rng: np.random.Generator) -> Any:
    for shape in ((3,), (2, 3), (3, 5, 7), (70, 16, 4), (3, 5000), (9, 8192)):
        arrays = {
            "x": draw(rng, *shape),
            "i samples": 3 * np.arange(shape[0]) + 2**33,
            "x out": blank(*shape),
        }
        given = (0.25, 2**32 + 11, 7, 5)
        yield Case(
            arrays,
            lambda b, a, given=given: b.random.dropout(
                a["x"], *given, a["i samples"], out=a["x out"]
            ),
        )


BETAS = {"beta1": 0.75, "beta2": 0.9375, "epsilon": 1e-3}
SCHEDULE = {"mu": 0.75, "mu_next": 0.8125, "mu_product": 0.5}

MAKERS: dict[str, Callable[[np.random.Generator], Any]] = {
    "fused.evaluate": fused(gate=False),
    "fused.gate": fused(gate=True),
    "fused.gate_norms": gate_norms,
    "norm.statistics": columns(
        lambda b, a: b.norm.statistics(a["x"], out=a["d sums"], accumulate=True),
        lambda channels: {"d sums": np.ones(1 + 2 * channels)},
    ),
    "norm.statistics_coefficients": columns(
        lambda b, a: b.norm.statistics_coefficients(
            *(a["x"], a["t gamma"], a["t beta"], 1e-5),
            **{"sums": a["d sums"], "moments": a["d moments"], "out": a["t map"]},
            collect=a["d collect"],
        ),
        lambda channels: {
            "d sums": blank(1 + 2 * channels),
            "d collect": np.ones(1 + 2 * channels),
            "d moments": blank(2, channels),
            "t map": blank(3, channels),
        },
    ),
    "norm.normalize": columns(
        lambda b, a: b.norm.normalize(a["x"], a["d a"], a["d b"], out=a["x out"]), lambda _: {}
    ),
    "norm.backward_statistics": columns(
        lambda b, a: b.norm.backward_statistics(
            a["x"], a["x dy"], a["d a"], a["d b"], out=a["d sums"]
        ),
        lambda channels: {"d sums": blank(2, channels)},
    ),
    "norm.backward_normalize": columns(
        lambda b, a: b.norm.backward_normalize(
            a["x"], a["x dy"], a["d a"], a["d b"], a["d a"], out=a["x out"]
        ),
        lambda _: {},
    ),
    "norm.coefficients": map_of_norm,
    "norm.backward_coefficients": map_of_gradient,
    "norm.fold": fold,
    "norm.group_forward": group(backward=False),
    "norm.group_backward": group(backward=True),
    "elementwise.forward": flat(activate(backward=False)),
    "elementwise.backward": flat(activate(backward=True)),
    "elementwise.add": flat(lambda b, a: b.elementwise.add(a["x"], a["x y"], out=a["x out"])),
    "elementwise.convert": converted,
    "elementwise.softmax_forward": columns(
        lambda b, a: b.elementwise.softmax_forward(a["x"], out=a["x out"]), lambda _: {}
    ),
    "elementwise.softmax_backward": columns(
        lambda b, a: b.elementwise.softmax_backward(a["x dy"], a["x"], out=a["x out"]), lambda _: {}
    ),
    "linear.backward_bias": columns(
        lambda b, a: b.linear.backward_bias(a["x dy"], out=a["t beta"], accumulate=True),
        lambda _: {},
    ),
    "loss.cross_entropy": loss(
        lambda f, y, t, scale, out: f.cross_entropy(y, t, 0.125, scale, out=out), classes=True
    ),
    "loss.hinge": loss(lambda f, *a, out: f.hinge(*a, out=out), classes=True),
    "loss.binary_cross_entropy": loss(
        lambda f, *a, out: f.binary_cross_entropy(*a, out=out), classes=False
    ),
    "loss.squared_error": loss(lambda f, *a, out: f.squared_error(*a, out=out), classes=False),
    "loss.absolute_error": loss(lambda f, *a, out: f.absolute_error(*a, out=out), classes=False),
    "pool.max_forward": images(max_forward),
    "pool.max_backward": images(max_backward),
    "pool.average_forward": images(average),
    "pool.average_backward": images(lambda b, a, g: average(b, a, g, counted=True)),
    "pool.adaptive_forward": images(adaptive),
    "pool.adaptive_backward": images(adaptive),
    "random.dropout": dropped,
    "update.sgd": flat(
        lambda b, a: b.update.sgd(
            a["x"], a["x y"], a["x z"], lr=a["d lr"], decay=0.125, momentum=0.5, nesterov=True
        )
    ),
    "update.rmsprop": flat(
        lambda b, a: b.update.rmsprop(
            a["x"], a["x y"], a["x z"], lr=a["d lr"], decay=0.125, rho=0.5, epsilon=1e-3
        )
    ),
    "update.adam": flat(
        lambda b, a: b.update.adam(
            *(a["x"], a["x y"], a["x z"], a["x out"]),
            **{"lr": a["d lr"], "decay": 0.125, "step": a["d step"], "decoupled": True, **BETAS},
        )
    ),
    "update.nadam": flat(
        lambda b, a: b.update.nadam(
            *(a["x"], a["x y"], a["x z"], a["x out"]),
            **{"lr": a["d lr"], "decay": 0.125, "step": a["d step"], **BETAS, **SCHEDULE},
        )
    ),
    "update.scale": flat(lambda b, a: b.update.scale(a["x"], 0.375)),
    "update.unscale": flat(lambda b, a: b.update.unscale(a["x"], a["d lr"], a["d go"])),
    "update.squared_norm": flat(lambda b, a: b.update.squared_norm(a["x"])),
    "update.watch": steering(lambda b, a: b.update.watch(a["d totals"], a["d alive"], a["d go"])),
    "update.rescale": steering(
        lambda b, a: b.update.rescale(a["d scale"], a["d good"], a["d go"], interval=2)
    ),
    "update.clip_factor": steering(lambda b, a: b.update.clip_factor(a["d square"], 2.0)),
    "update.trust": steering(
        lambda b, a: b.update.trust(
            a["d square"], a["d square"], a["d other"], factor=0.5, decay=0.25
        )
    ),
}
"""Cases of each kernel; convolutions and products have tests of their own."""
