"""Every kernel with something to compute; see `cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.kernels import ConvGeometry, Deferred, PoolGeometry, Term
from pydtnn.kernels.reference.attention import At, Dropped
from pydtnn.kernels.reference.elementwise import ACTIVATIONS
from pydtnn.kernels.reference.norm import NormGradient
from tests.kernels.cases import (
    LOSSES,
    SHAPES,
    Arrays,
    Case,
    blank,
    columns,
    draw,
    flat,
    images,
    loss,
    products,
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
    return list((MAKERS | OF_THE_HOST)[kernel](rng))


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
            "s rows": np.array([7.0]),
            "d moments": table(rng, 2, channels),
            **{f"t {name}": table(rng, channels) for name in ("pivot", "gamma", "beta", "dbeta")},
            "t out": blank(3, channels),
            "t first": blank(2, channels),
        }

        def run(b: Any, a: Arrays) -> None:
            given = (a["d sums"], a["s rows"], a["d moments"], a["t pivot"], a["t gamma"])
            first, second = (
                {"dgamma": a["t first"][0], "dbeta": a["t first"][1]},
                {
                    "dgamma": a["t beta"],
                    "dbeta": a["t dbeta"],
                },
            )
            b.norm.backward_coefficients(*given, **first, out=a["t out"])
            b.norm.backward_coefficients(*given, **second, out=a["t out"], accumulate=True)

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
                "s rows": np.array([7.0]),
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
                        *([7, a["s rows"]][i], a["d moments"], a["t gamma"], *a[f"t grads {i}"]),
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
                "t first": blank(2, shape[2]),
            }

            def run(b: Any, a: Arrays, groups: int = groups) -> None:
                moments = {"mean": a["d mean"], "inv_std": a["d inv_std"]}
                if not backward:
                    tables = (a["t gamma"], a["t beta"], groups, 1e-5)
                    return b.norm.group_forward(a["x"], *tables, out=a["x out"], **moments)
                given = (a["x"], a["x dy"], a["t gamma"], groups, *moments.values())
                for accumulate, (dgamma, dbeta) in (
                    (False, a["t first"]),
                    (True, (a["t dgamma"], a["t dbeta"])),
                ):
                    sums = {"dgamma": dgamma, "dbeta": dbeta, "accumulate": accumulate}
                    b.norm.group_backward(*given, out=a["x out"], **sums)

            yield Case(arrays, run)

    return make


def activate(backward: bool) -> Callable[[np.random.Generator], Any]:
    """Of odd multiples of 1/4 up to 8, which are no corners of a function."""

    def make(rng: np.random.Generator) -> Any:
        for n in (0, 1, 7, 31, 1024, 5003, 70001):
            arrays = {"x": draw(rng, n), "x z": 4 * draw(rng, n)}
            arrays |= {f"x {name}": blank(n) for name in ACTIVATIONS}
            arrays["x positive"] = abs(arrays["x z"])

            def run(b: Any, a: Arrays) -> None:
                for name in ACTIVATIONS:
                    z = a["x positive" if name == "log" else "x z"]
                    if backward:
                        b.elementwise.backward(name, a["x"], z, out=a[f"x {name}"], alpha=0.25)
                    else:
                        b.elementwise.forward(name, z, out=a[f"x {name}"], alpha=0.25)

            yield Case(arrays, run)

    return make


def convert(b: Any, a: Arrays) -> None:
    b.elementwise.convert(a["x"], out=a["d wide"])
    b.elementwise.convert(a["x y"], out=a["t narrow"], accumulate=True)


def converted(rng: np.random.Generator) -> Any:
    for n in (0, 1, 7, 4099, 70001):
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


def sums_of_backward(b: Any, a: Arrays) -> None:
    given = a["x"], a["x dy"], a["d a"], a["d b"]
    b.norm.backward_statistics(*given, out=a["d sums"])
    b.norm.backward_statistics(*given, out=a["d more"], accumulate=True)


def sgd(b: Any, a: Arrays) -> None:
    w, g, velocity, given = a["x"], a["x y"], a["x z"], {"lr": a["s lr"], "decay": 0.125}
    b.update.sgd(w, g, None, momentum=0.0, nesterov=False, **given)
    for nesterov in (False, True):
        b.update.sgd(w, g, velocity, momentum=0.5, nesterov=nesterov, **given)


def adam(b: Any, a: Arrays) -> None:
    arrays, given = (a["x"], a["x y"], a["x z"], a["x out"]), {"lr": a["s lr"], "decay": 0.125}
    for decoupled in (False, True):
        b.update.adam(*arrays, step=a["s step"], decoupled=decoupled, **given, **BETAS)


def filters(b: Any, a: Arrays) -> None:
    b.linear.backward_filter(a["x"], a["x dy"], out=a["t dw"])
    b.linear.backward_filter(a["x"], a["x dy"], out=a["t more"], accumulate=True)


def dropped(rng: np.random.Generator) -> Any:
    for shape in ((0, 5), (3,), (2, 3), (3, 5, 7), (70, 16, 4), (3, 5000), (9, 8192)):
        arrays = {
            "x": draw(rng, *shape),
            "i samples": 3 * np.arange(shape[0]) + 2**33,
            "x out": blank(*shape),
        }

        def run(b: Any, a: Arrays) -> None:
            b.random.dropout(a["x"], 0.25, 2**32 + 11, 7, 5, a["i samples"], out=a["x out"])

        yield Case(arrays, run)


BETAS = {"beta1": 0.75, "beta2": 0.9375, "epsilon": 1e-3}
SCHEDULE = {"mu": 0.75, "mu_next": 0.8125, "mu_product": 0.5}

MAKERS: dict[str, Callable[[np.random.Generator], Any]] = {
    "fused.evaluate": fused(gate=False),
    "fused.gate": fused(gate=True),
    "fused.gate_norms": gate_norms,
    "norm.statistics": columns(
        lambda b, a: b.norm.statistics(a["x"], out=a["d sums"], accumulate=True),
        lambda rows, channels: {"d sums": np.ones(1 + 2 * channels)},
    ),
    "norm.statistics_coefficients": columns(
        lambda b, a: b.norm.statistics_coefficients(
            *(a["x"], a["t gamma"], a["t beta"], 1e-5),
            **{"sums": a["d sums"], "moments": a["d moments"], "out": a["t map"]},
            collect=a["d collect"],
        ),
        lambda rows, channels: {
            "d sums": blank(1 + 2 * channels),
            "d collect": np.ones(1 + 2 * channels),
            "d moments": blank(2, channels),
            "t map": blank(3, channels),
        },
    ),
    "norm.normalize": columns(
        lambda b, a: b.norm.normalize(a["x"], a["d a"], a["d b"], out=a["x out"]),
    ),
    "norm.backward_statistics": columns(
        sums_of_backward,
        lambda rows, channels: {"d sums": blank(2, channels), "d more": np.ones((2, channels))},
    ),
    "norm.backward_normalize": columns(
        lambda b, a: b.norm.backward_normalize(
            a["x"], a["x dy"], a["d a"], a["d b"], a["d a"], out=a["x out"]
        ),
    ),
    "norm.coefficients": map_of_norm,
    "norm.backward_coefficients": map_of_gradient,
    "norm.fold": fold,
    "norm.group_forward": group(backward=False),
    "norm.group_backward": group(backward=True),
    "elementwise.forward": activate(backward=False),
    "elementwise.backward": activate(backward=True),
    "elementwise.add": flat(lambda b, a: b.elementwise.add(a["x"], a["x y"], out=a["x out"])),
    "elementwise.convert": converted,
    "elementwise.softmax_forward": columns(
        lambda b, a: b.elementwise.softmax_forward(a["x"], out=a["x out"]),
    ),
    "elementwise.softmax_backward": columns(
        lambda b, a: b.elementwise.softmax_backward(a["x dy"], a["x"], out=a["x out"]),
    ),
    "linear.forward": products(
        lambda b, a: b.linear.forward(a["x"], a["x w"], a["t b"], out=a["x y"])
    ),
    "linear.backward_data": products(
        lambda b, a: b.linear.backward_data(a["x dy"], a["x w"], out=a["x dx"])
    ),
    "linear.backward_filter": products(filters),
    "linear.backward_bias": columns(
        lambda b, a: b.linear.backward_bias(a["x dy"], out=a["t beta"], accumulate=True),
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
    "update.sgd": flat(sgd),
    "update.rmsprop": flat(
        lambda b, a: b.update.rmsprop(
            a["x"], a["x y"], a["x z"], lr=a["s lr"], decay=0.125, rho=0.5, epsilon=1e-3
        )
    ),
    "update.adam": flat(adam),
    "update.nadam": flat(
        lambda b, a: b.update.nadam(
            *(a["x"], a["x y"], a["x z"], a["x out"]),
            **{"lr": a["s lr"], "decay": 0.125, "step": a["s step"], **BETAS, **SCHEDULE},
        )
    ),
    "update.scale": flat(lambda b, a: b.update.scale(a["x"], 0.375)),
    "update.unscale": flat(lambda b, a: b.update.unscale(a["x"], a["d scale"], a["d go"])),
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
"""Cases of each kernel that a GPU has, too; convolutions have tests of their own."""

OPTIONS = {"lr": 0.125, "decay": 0.125}


def weighted(rng: np.random.Generator) -> Any:
    for rows, outputs in LOSSES:
        arrays = {
            "x": draw(rng, rows, outputs),
            "i target": rng.integers(0, outputs, rows),
            "t weights": abs(table(rng, outputs)),
            **{f"x out {i}": blank(rows, outputs) for i in range(2)},
        }

        def run(b: Any, a: Arrays) -> float:
            x, target, loss = a["x"], a["i target"], b.loss.weighted_cross_entropy
            first = loss(x, target, a["t weights"], 2, 0.125, 0.5, out=a["x out 0"])
            return first + loss(x, target, None, None, 0.0, 0.25, out=a["x out 1"])

        yield Case(arrays, run)


def attention(run: Callable[[Any, Arrays, int], None]) -> Callable[..., Any]:
    def make(rng: np.random.Generator) -> Any:
        for n, length, heads, width in ((1, 1, 1, 1), (0, 5, 2, 3), (3, 20, 2, 4), (2, 57, 3, 17)):
            size = (n, length, heads * width)
            arrays = {
                **{f"x {name}": draw(rng, *size) for name in ("q", "y", "dy")},
                "x qkv": draw(rng, n, length, 3 * heads * width),
                "x kv": draw(rng, n, 9, 2 * heads * width),
                **{f"x {name}": blank(*size) for name in ("out", "dq")},
                "x dqkv": blank(n, length, 3 * heads * width),
                "x dkv": blank(n, 9, 2 * heads * width),
                "t log": 3 + table(rng, n, heads, length),
                "t sums": blank(n, heads, length),
                "i samples": np.arange(n),
            }
            yield Case(arrays, lambda b, a, heads=heads: run(b.attention, a, heads))

    return make


AT = At(5, 2, 90)


def attend(f: Any, a: Arrays, heads: int) -> None:
    f.forward(a["x qkv"], heads, out=a["x out"], log_sums=a["t sums"], causal=True)


def attend_back(f: Any, a: Arrays, heads: int) -> None:
    dropout = Dropped(0.25, 1, 2, 3, a["i samples"])
    given = a["x dy"], a["x qkv"], a["x y"], a["t log"], heads
    f.backward(*given, out=a["x dqkv"], dropout=dropout)


def attend_block(f: Any, a: Arrays, heads: int) -> None:
    f.forward_block(a["x q"], a["x kv"], heads, AT, out=a["x out"], log_sums=a["t sums"])


def attend_block_back(f: Any, a: Arrays, heads: int) -> None:
    given = a["x dy"], a["x q"], a["x kv"], a["x y"], a["t log"], heads, AT
    f.backward_block(*given, out=a["x dq"], out_kv=a["x dkv"], causal=True)


CONV = ConvGeometry((5, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4, 6, 2)


def convolution(run: Callable[[Any, Arrays], None]) -> Callable[[np.random.Generator], Any]:
    def make(rng: np.random.Generator) -> Any:
        x, y = (3, *CONV.size, 4), (3, *CONV.output, 6)
        arrays = {
            **{name: table(rng, *x) for name in ("x0", "x1", "x", "x add")},
            **{"x w": table(rng, *CONV.weight_shape), "x dy": draw(rng, *y), "t b": table(rng, 6)},
            **{"t pivot": table(rng, 4), "t factor": table(rng, 4), "t shift": draw(rng, 4) / 2},
            **{"x y": blank(*y), "x second": blank(*y), "x store": blank(*x)},
            **{"x dx": blank(*x), "x gated": blank(*x)},
            **{"t dw": blank(*CONV.weight_shape), "t more": table(rng, *CONV.weight_shape)},
        }
        yield Case(arrays, lambda b, a: run(b.conv, a))

    return make


def convolve(f: Any, a: Arrays) -> None:
    f.forward(a["x"], a["x w"], a["t b"], CONV, out=a["x y"], relu=True)
    f.forward(deferred(a, 2), a["x w"], None, CONV, out=np.empty_like(a["x y"]), store=a["x store"])


def convolve_back(f: Any, a: Arrays) -> None:
    f.backward_data(a["x dy"], a["x w"], CONV, out=a["x dx"], add=a["x add"])
    f.backward_data(a["x dy"], a["x w"], CONV, out=a["x gated"], gate=deferred(a, 2))


def convolve_filter(f: Any, a: Arrays) -> None:
    f.backward_filter(a["x"], a["x dy"], CONV, out=a["t dw"])
    f.backward_filter(a["x"], a["x dy"], CONV, out=a["t more"], accumulate=True)


def convolve_both(f: Any, a: Arrays) -> None:
    f.backward(a["x"], a["x dy"], a["x w"], CONV, dx=a["x dx"], dw=a["t dw"])


def rms_back(b: Any, a: Arrays) -> None:
    given = a["x"], a["x dy"], a["t gamma"], a["d inv"]
    b.norm.rms_backward(*given, out=a["x out"], dgamma=a["t dgamma"])
    b.norm.rms_backward(*given, out=a["x out"], dgamma=a["t beta"], accumulate=True)


OF_THE_HOST: dict[str, Callable[[np.random.Generator], Any]] = {
    "linear.take_rows": products(
        lambda b, a: b.linear.take_rows(a["x w"], a["i rows"], out=a["x dx"])
    ),
    "linear.add_rows": products(
        lambda b, a: b.linear.add_rows(a["x"], a["i rows"], out=a["t more"], accumulate=True)
    ),
    "norm.rms_forward": columns(
        lambda b, a: b.norm.rms_forward(
            a["x"], a["t gamma"], 1e-3, out=a["x out"], inv_rms=a["d inv"]
        ),
        lambda rows, channels: {"d inv": blank(rows, 1)},
    ),
    "norm.rms_backward": columns(
        rms_back,
        lambda rows, channels: {"d inv": np.full((rows, 1), 0.75), "t dgamma": blank(channels)},
    ),
    "norm.local_response_forward": columns(
        lambda b, a: b.norm.local_response_forward(a["x"], 4, 0.25, 0.75, 2.0, out=a["x out"])
    ),
    "norm.local_response_backward": columns(
        lambda b, a: b.norm.local_response_backward(
            a["x"], a["x dy"], 4, 0.25, 0.75, 2.0, out=a["x out"]
        )
    ),
    "loss.weighted_cross_entropy": weighted,
    "update.adagrad": flat(
        lambda b, a: b.update.adagrad(
            a["x"], a["x y"], a["x z"], initial=0.125, epsilon=1e-3, **OPTIONS
        )
    ),
    "update.lion": flat(
        lambda b, a: b.update.lion(a["x"], a["x y"], a["x z"], beta1=0.75, beta2=0.5, **OPTIONS)
    ),
    "attention.forward": attention(attend),
    "attention.backward": attention(attend_back),
    "attention.forward_block": attention(attend_block),
    "attention.backward_block": attention(attend_block_back),
    "conv.forward": convolution(convolve),
    "conv.backward_data": convolution(convolve_back),
    "conv.backward_filter": convolution(convolve_filter),
    "conv.backward": convolution(convolve_both),
}
"""Those that the GPU has no kernels for, or that have tests of their own there."""
