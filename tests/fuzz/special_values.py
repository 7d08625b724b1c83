"""Kernels with NaN, infinities, -0.0 and subnormal numbers in random places, beside the reference.

Numbers are multiples of 1/4 of a few bits, so that sums of them are exact in any order and a ReLU
or a maximum decides alike everywhere. A call is described by its arrays; `run` makes it with copies
of them and returns all that may have been written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any
from unittest.mock import patch

import numpy as np

from pydtnn.kernels import Backend, ConvGeometry, Deferred, PoolGeometry, Term, create_backend
from pydtnn.kernels.cpu.conv import candidates
from pydtnn.kernels.cpu.isa import PAIRING
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.attention import At
from pydtnn.kernels.reference.elementwise import FUNCTIONS
from pydtnn.kernels.reference.family import wide
from pydtnn.layers.masks import positions_seen
from tests.kernels import every_kernel
from tests.kernels.every_kernel import MAKERS, OF_THE_HOST, Case

HALF = np.dtype("bfloat16")
DTYPES = (np.dtype("float32"), np.dtype("float64"), HALF)
NUMPY = create_backend("numpy")

PATTERNS = {  # NaN of both signs, signalling and quiet, with few and many bits; subnormal numbers
    np.dtype("float32"): (
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF80FFFF),
        *(0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00010000, 0x80010000),
    ),
    np.dtype("float64"): (
        *(0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1, 2**63 - 1, 2**64 - 1, (0xFFF0 << 48) + 9),
        *(1, 2**63 + 1, 2**52 - 1, 2**63 + 2**52 - 1, 2**30, 2**63 + 2**30),
    ),
    HALF: (
        *(0x7FC0, 0xFFC0, 0x7F81, 0x7FFF, 0xFFFF, 0xFF81),
        *(0x0001, 0x8001, 0x007F, 0x807F, 0x0010, 0x8010),
    ),
}
EDGES = (0.0, -0.0, 6.0, 3.0, -3.0, 1.0)


class Draw:
    """Random arrays of one case."""

    def __init__(self, rng: np.random.Generator, dtype: np.dtype) -> None:
        self.rng, self.dtype = rng, dtype
        self.share = float(rng.choice([0.0, 0.002, 0.02, 0.3]))
        self.kinds = [kind for kind in ("nan", "inf", "tiny") if rng.random() < 0.6]

    def chance(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def size(self, most: int = 70) -> int:
        """A length: short ones, multiples of vectors, and others."""
        few = [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200]
        return self.pick([n for n in few if n <= most])

    def numbers(self, shape: Any, dtype: Any = None) -> np.ndarray:
        """Multiples of 1/4 without special values."""
        return (self.rng.integers(-12, 13, shape) / 4).astype(dtype or self.dtype)

    def array(self, shape: Any, dtype: Any = None, most: float = 1.0) -> np.ndarray:
        """Numbers, some of which are special."""
        array = self.numbers(shape, dtype)
        self.inject(array, most)
        return array

    def inject(self, array: np.ndarray, most: float = 1.0) -> None:
        """Put special values into random places, mostly."""
        if array.size and self.chance(0.7):
            flat = array.reshape(-1)
            count = 1 + int(self.share * most * array.size)
            bits = flat.view(f"u{array.dtype.itemsize}")
            for place in self.rng.choice(flat.size, min(count, flat.size), replace=False):
                special = self.special(array.dtype)
                if isinstance(special, int):
                    bits[place] = special
                else:
                    flat[place] = special

    def special(self, dtype: np.dtype) -> int | float:
        kind = self.pick([*self.kinds, "edge"])
        patterns = PATTERNS[dtype]
        if kind == "nan":
            return self.pick(patterns[:6])
        if kind == "tiny":
            return self.pick(patterns[6:])
        return self.pick(EDGES) if kind == "edge" else self.pick((inf, -inf))

    def deferred(self, shape: tuple[int, ...], relu: bool | None = None) -> Deferred:
        """A deferred array; coefficients are powers of two and small.

        Without subnormal numbers, which round away or not depending on the order of a sum.
        """
        channels, real = shape[-1], arithmetic(self.dtype)
        self.kinds = [kind for kind in self.kinds if kind != "tiny"]

        def coefficient(values: Sequence[float]) -> np.ndarray:
            array = self.rng.choice(values, channels).astype(real)
            if self.chance(0.1):
                array[int(self.rng.integers(channels))] = self.pick((np.nan, inf, -0.0))
            return array

        terms = [
            Term(
                self.array(shape),
                *(
                    (coefficient((0, 0.5, -0.25)), coefficient((1, 2, -0.5)))
                    if self.chance(0.8)
                    else (None, None)
                ),
            )
            for _ in range(1 + self.chance())
        ]
        shift = coefficient((0, 0.25, -0.5)) if self.chance(0.7) else None
        relu = self.chance(0.7) if relu is None else relu
        return Deferred(*terms, shift=shift, relu=relu, limit=self.pick((inf, inf, 6.0, 0.5)))

    def empty(self, shape: Any, dtype: Any = None) -> np.ndarray:
        """What a kernel writes: any number, to which it may also add."""
        return self.numbers(shape, dtype)


@dataclass
class Call:
    """A call of ``backend.family.kernel(*args, **options)``.

    Attributes
    ----------
    algorithm : str or None
        An option that only compiled kernels take.
    """

    family: str
    kernel: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    algorithm: str | None = None

    def run(self, backend: Backend) -> list[np.ndarray]:
        """All floating arrays of the call afterwards, and its result."""
        arrays: list[np.ndarray] = []
        args = [_copied(value, arrays) for value in self.args]
        options = {name: _copied(value, arrays) for name, value in self.options.items()}
        if self.algorithm and backend.name == "cpu":
            options["algorithm"] = self.algorithm
        with np.errstate(all="ignore"):
            result = getattr(getattr(backend, self.family), self.kernel)(*args, **options)
        if isinstance(result, float | np.floating):
            arrays.append(np.asarray(result))
        return arrays

    def __str__(self) -> str:
        named = {**dict(enumerate(self.args)), **self.options}
        given = [f"{name}={_shape(value)}" for name, value in named.items()]
        return f"{self.family}.{self.kernel}({', '.join(given)}) {self.algorithm or ''}"


def _shape(value: Any) -> Any:
    if isinstance(value, list):
        return [_shape(part) for part in value]
    return getattr(value, "shape", value)


def _copied(value: Any, arrays: list[np.ndarray]) -> Any:
    """A copy, whose floating arrays are noted."""
    if isinstance(value, np.ndarray):
        own = value.copy()
        if own.dtype.kind == "f" or own.dtype == HALF:
            arrays.append(own)
        return own
    if isinstance(value, Deferred):
        terms = [Term(*(_copied(part, arrays) for part in term)) for term in value.terms]
        return value.of_terms(*terms, shift=_copied(value.shift, arrays))
    if isinstance(value, list):
        return [_copied(part, arrays) for part in value]
    return copy.copy(value)


SUMMING = ("attention", "fused", "linear", "norm")
"""Families whose sums of infinities may be NaN: of squares less the square of a mean, of numbers
relative to one of them, or of products with subnormal numbers, which are 0 in products of pairs."""


def compare(call: Call | Injected, backend: Backend) -> None:
    """Check that an array is NaN where that of the reference is, and else as it is."""
    results = call.run(backend), call.run(NUMPY)
    least = unmasked(call) if isinstance(call, Call) and call.family == "attention" else results[1]
    for number, (value, exact, needed) in enumerate(zip(*results, least, strict=True)):
        what = f"{backend.isa} {call}, array {number}"
        same_specials(value, exact, what, needed, loose=call.family in SUMMING)


def same_specials(
    value: np.ndarray,
    exact: np.ndarray,
    what: str,
    needed: np.ndarray | None = None,
    loose: bool = False,
) -> None:
    """Check NaN, infinities, and that other elements are near.

    `needed` is NaN where `value` has to be, `exact` where it may; with `loose` it may where `exact`
    is infinite, too.
    """
    value, exact = (np.asarray(wide(a), "float64") for a in (value, exact))
    needed = exact if needed is None else wide(needed)
    lost = np.isnan(needed) & ~np.isnan(value)
    assert not lost.any(), f"{what}: NaN lost at {places(lost)}, {value[lost][:3]}"
    kept = np.isfinite(exact) if loose else ~np.isnan(exact)
    more = np.isnan(value) & kept
    assert not more.any(), f"{what}: NaN instead of {exact[more][:3]} at {places(more)}"
    other = ~np.isnan(value) & ~np.isnan(exact) & (value != exact)
    other &= ~(np.isfinite(value) & np.isfinite(exact))
    assert not other.any(), f"{what}: {value[other][:3]} for {exact[other][:3]} at {places(other)}"
    known = np.isfinite(value) & np.isfinite(exact)
    error = np.linalg.norm((value - exact)[known])
    assert error <= 0.05 * np.linalg.norm(exact[known]) + 0.01, f"{what}: off by {error}"


def unmasked(call: Call) -> list[np.ndarray]:
    """What a call of attention gives if each query is alone with the keys that it has weights for.

    The reference multiplies the values of other keys by 0, which is NaN if they are.
    """
    backward, options = call.kernel.startswith("backward"), dict(call.options)
    blocks = "kv" in call.options
    arrays: list[np.ndarray] = []
    args = [_copied(value, arrays) for value in call.args]
    options = {name: _copied(value, arrays) for name, value in options.items()}
    dy, args = (args[0], args[1:]) if backward else (None, args)
    q, kv = (
        (args[0], options["kv"]) if blocks else np.split(args[0], [args[0].shape[-1] // 3], axis=-1)
    )
    y, sums = args[-3:-1] if backward else (options["out"], options["log_sums"])
    heads = next(arg for arg in args if isinstance(arg, int))
    dq, dkv = np.zeros(q.shape, wide(q).dtype), np.zeros(kv.shape, wide(kv).dtype)
    for n in range(len(q)):
        for i, (first, end) in enumerate(options["seen"][n]):
            one, row, keys = slice(n, n + 1), slice(i, i + 1), slice(first, end)
            if first >= end:
                continue
            part, pair, at = q[one, row], kv[one, keys], At(0, 0, end - first)
            with np.errstate(all="ignore"):
                if not backward:
                    log_sum = np.empty((1, heads, 1), sums.dtype)
                    NUMPY.attention.forward(
                        part, heads, out=y[one, row], log_sums=log_sum, kv=pair, at=at
                    )
                    sums[one, :, row] = log_sum
                    continue
                terms = np.zeros(part.shape, dq.dtype), np.zeros(pair.shape, dq.dtype)
                given = (dy[one, row], part, y[one, row], sums[one, :, row], heads)
                NUMPY.attention.backward(*given, out=terms[0], out_kv=terms[1], kv=pair, at=at)
                dq[one, row] += terms[0]
                dkv[one, keys] += terms[1]
    if backward and blocks:
        options["out"][...], options["out_kv"][...] = dq, dkv
    elif backward:
        options["out"][...] = np.concatenate([dq, dkv], axis=-1)
    return arrays


def places(where: np.ndarray) -> str:
    found = np.argwhere(where)
    return f"{len(found)} places of {where.shape}, {found[:3].tolist()}"


# -- calls of each family


OTHERS = (
    *("attention", "conv", "fused", "elementwise.forward"),
    *("elementwise.backward", "update.watch", "update.rescale", "update.clip_factor"),
    *("update.trust", "update.unscale"),
)
"""What is drawn by itself, and kernels of numbers that steer."""

KERNELS = [kernel for kernel in MAKERS | OF_THE_HOST if not kernel.startswith(OTHERS)]
SQUARES = {
    **dict.fromkeys(("update.adam", "update.nadam"), "x out"),
    **dict.fromkeys(("update.rmsprop", "update.adagrad"), "x z"),
}
"""Means of squares, by kernel, which are never negative."""

PLAIN = {
    "norm.backward_statistics": ("d a", "d b"),
    "loss.binary_cross_entropy": ("x target",),
    "loss.weighted_cross_entropy": ("t weights",),
}
"""Arrays without special numbers, by kernel, beside those that steer."""


@dataclass
class Injected:
    """Calls of the table of all kernels, of random sizes, with special numbers in what they read.

    Attributes
    ----------
    case : Case
    arrays : dict
    """

    case: Case
    arrays: dict[str, np.ndarray]

    @property
    def family(self) -> str:
        return self.case.kernel.split(".")[0]

    def run(self, backend: Backend) -> list[np.ndarray]:
        """All floating arrays afterwards, and what the kernel returns."""
        arrays: list[np.ndarray] = []
        given = {
            n: float(a[0]) if n[0] == "s" else _copied(a, arrays) for n, a in self.arrays.items()
        }
        with np.errstate(all="ignore"):
            value = self.case.run(backend, given)
        return arrays if value is None else [*arrays, np.asarray(value)]

    def __str__(self) -> str:
        return f"{self.case.kernel}({ {name: a.shape for name, a in self.arrays.items()} })"


def pooling(d: Draw) -> PoolGeometry:
    axes = int(d.rng.integers(1, 4))
    while True:
        size = tuple(int(d.rng.integers(1, 12 if axes < 3 else 6)) for _ in range(axes))
        kernel = tuple(int(d.rng.integers(1, 5)) for _ in range(axes))
        padding = tuple(tuple(int(p) for p in d.rng.integers(0, k // 2 + 1, 2)) for k in kernel)
        stride = tuple(int(d.rng.integers(1, 4)) for _ in range(axes))
        geometry = PoolGeometry(size, kernel, stride, padding, d.size(130))
        if min(geometry.output) > 0:
            return geometry


def sizes(d: Draw) -> dict[str, Any]:
    """Random sizes in place of those of the table."""
    n, channels, geometry = d.size(), d.size(200), pooling(d)
    bins = tuple(int(d.rng.integers(1, size + 1)) for size in geometry.size)
    groups = d.pick([g for g in (1, 2, 3, 4, channels) if channels % g == 0])
    return {
        "SHAPES": [(d.size(300), d.size(300))],
        "SIZES": [d.size() * d.size(300)],
        "IMAGES": [(int(d.rng.integers(1, 4)), geometry, bins)],
        "LOSSES": [(n, channels)],
        "PRODUCTS": [(n, d.size(200), channels)],
        "GROUPS": [((n, int(d.rng.integers(1, 6)), channels), groups)],
    }


def injected(d: Draw) -> Injected:
    kernel = d.pick(KERNELS)
    if kernel.startswith("update"):
        d.dtype = arithmetic(d.dtype)
    with patch.multiple(every_kernel, **sizes(d)):
        case = d.pick(every_kernel.cases(kernel, d.rng))
    if kernel != "pool.max_backward":  # which takes what the other returns
        case = case._replace(calls=(d.pick(case.calls),))
    arrays = case.typed(d.dtype.name)
    real = arithmetic(d.dtype)
    if kernel.endswith("normalize"):
        wide_type = d.pick((real, np.dtype("float64")))
        arrays |= {n: a.astype(wide_type) for n, a in arrays.items() if n in ("d a", "d b")}
    elif kernel == "norm.statistics" and d.dtype == np.float64 and d.chance():
        parts = 1 + 4 * arrays["x"].shape[1]
        arrays |= {"d sums": np.zeros(parts), "d collect": np.ones(parts)}
    elif kernel == "norm.backward_coefficients":
        arrays["s rows"][:] = d.pick((7.0, inf))
    elif kernel == "update.scale":
        arrays["s lr"][:] = d.pick((0.5, inf, np.nan))
    elif kernel == "elementwise.convert":
        arrays["d wide"] = arrays["d wide"].astype(d.pick(DTYPES))
    elif kernel.startswith("pool.max"):
        arrays["b index"] = arrays["b index"].astype(d.pick(("uint8", "int32")))
    plain = ("x",) if case.calls[-1][1].get("decoupled") else PLAIN.get(kernel, ())
    for name, array in arrays.items():
        floats = array.dtype.kind == "f" or array.dtype == HALF
        written = array.size and np.isnan(array).all()
        if floats and not written and name[0] != "s" and name not in plain:
            d.inject(array)
        if name == "t gamma":  # times what rounds to 0, or not, infinities are NaN
            array[np.isinf(array)] = 1
        if name == SQUARES.get(kernel):
            np.abs(array, out=array)
    x, gamma = arrays.get("x"), arrays.get("t gamma")
    with np.errstate(all="ignore"):
        if kernel == "norm.group_backward":
            moments = {"mean": arrays["d mean"], "inv_std": arrays["d inv_std"]}
            given = (x, gamma, gamma, case.constants["groups"], 1e-5)
            NUMPY.norm.group_forward(*given, out=arrays["x out"].copy(), **moments)
        elif kernel == "norm.rms_backward":
            y = arrays["x out"].copy()
            NUMPY.norm.rms_forward(x, gamma, 1e-5, out=y, inv_rms=arrays["d given"])
    return Injected(case, arrays)


def elementwise(d: Draw) -> Call:
    name, shape = d.pick(sorted(FUNCTIONS)), (d.size(), d.size(300))
    x, z, options = d.array(shape), d.array(shape), {"out": d.empty(shape), "alpha": 0.25}
    if d.chance():
        return Call("elementwise", "forward", (name, x), options)
    if name in ("gelu", "gelu_exact", "silu"):  # times what rounds to 0, or not, it is NaN
        x[np.isinf(x)] = 1
    return Call("elementwise", "backward", (name, x, z), options)


def fused(d: Draw) -> Call:
    shape = (d.size(300), d.size(300))
    if d.chance():
        return Call("fused", "evaluate", (d.deferred(shape),), {"out": d.empty(shape)})
    value, dy = d.deferred(shape), d.array(shape)
    options: dict[str, Any] = {"out": d.empty(shape)}
    if d.chance():
        options["add"] = d.array(shape)
    if d.chance():
        options["sums"] = d.empty((1 + len(value.terms), shape[-1]), "float64")
    return Call("fused", "gate", (dy, value), options)


def attention(d: Draw) -> Call:
    """Without infinities: times weights that round to 0, or not, they are NaN."""
    d.kinds = [kind for kind in d.kinds if kind != "inf"]
    n, heads, e = int(d.rng.integers(1, 4)), int(d.rng.integers(1, 4)), d.size(64)
    queries, features = int(d.rng.integers(1, 70)), heads * e
    block, size = d.chance(0.4), (n, queries, features)
    window = d.size(queries) if d.chance(0.3) else None
    seen = positions_seen(queries, queries, d.chance(), window).repeat(n, axis=0)
    if d.chance(0.3):
        lengths = d.rng.integers(0, queries + 1, n)
        seen = np.minimum(seen, lengths[:, None, None])
    options: dict[str, Any] = {"seen": seen}
    y, sums = d.empty(size), d.empty((n, heads, queries), arithmetic(d.dtype))
    q = d.array(size if block else (n, queries, 3 * features), most=0.1)
    operands = [q]
    if block:
        operands.append(d.array((n, queries, 2 * features), most=0.1))
        options |= {"kv": operands[1], "at": At(0, 0, queries)}
    forward = Call("attention", "forward", (q, heads), {"out": y, "log_sums": sums})
    forward.options |= options
    if d.chance():
        return forward
    with np.errstate(all="ignore"):
        NUMPY.attention.forward(*forward.args, **forward.options)
    given = (d.array(size, most=0.1), q, y, sums, heads)
    outs = dict(zip(("out", "out_kv"), (d.empty(o.shape) for o in operands), strict=False))
    return Call("attention", "backward", given, {**outs, **options})


def recurrent(d: Draw) -> Call:
    """Without infinities: times gates that round to 0, or not, they are NaN."""
    d.kinds = [kind for kind in d.kinds if kind != "inf"]
    n, steps, units = int(d.rng.integers(1, 6)), int(d.rng.integers(1, 5)), d.size(70)
    cell, real = d.pick(("lstm", "gru")), arithmetic(d.dtype)
    rows = (4 if cell == "lstm" else 3) * units
    gates, u, b = (
        d.array((n, steps, rows), real),
        d.numbers((rows, units), real),
        d.array(rows, real),
    )
    options: dict[str, Any] = {"reverse": d.chance()}
    if d.chance():
        u = d.array(u.shape, real)
        options["first"] = [d.array((n, units), real) for _ in range(2 if cell == "lstm" else 1)]
    y, kept = (d.empty((n, steps, units), real) for _ in range(2))
    name = "cells" if cell == "lstm" else "products"
    outs: dict[str, Any] = {"out": y, name: kept}
    if d.chance():
        return Call("recurrent", f"{cell}_forward", (gates, u, b), {**outs, **options})
    with np.errstate(all="ignore"):
        getattr(NUMPY.recurrent, f"{cell}_forward")(gates, u, b, **outs, **options)
    dy, outs = d.array((n, steps, units), real), {"out": d.empty(gates.shape, real)}
    if "first" in options:
        outs["dfirst"] = [d.empty((n, units), real) for _ in options["first"]]
    if cell == "lstm":
        return Call("recurrent", "lstm_backward", (dy, gates, kept, u), {**outs, **options})
    outs["dproducts"] = d.empty(gates.shape, real)
    return Call("recurrent", "gru_backward", (dy, gates, y, kept, u), {**outs, **options})


DRAWN: tuple[Callable[[Draw], Call | Injected], ...] = (
    *(injected,) * 6,
    *(elementwise, fused, attention, recurrent),
)
"""What draws calls, each as often as the others: by the table that of six families."""


# -- convolutions


def geometry(d: Draw) -> ConvGeometry:
    """A random convolution of one to three axes."""
    axes = d.pick((1, 2, 2, 2, 3))
    while True:
        size = tuple(int(d.rng.integers(1, (40, 20, 6)[axes - 1])) for _ in range(axes))
        one = d.pick((1, 2, 3, 3, 5, 7))
        kernel = tuple(one if d.chance(0.8) else d.pick((1, 3)) for _ in range(axes))
        stride = (d.pick((1, 1, 2, 3)),) * axes
        dilation = (d.pick((1, 1, 1, 2)),) * axes
        padding = tuple(tuple(int(p) for p in d.rng.integers(0, max(k, 2), 2)) for k in kernel)
        if d.chance():
            padding = tuple((k // 2, k // 2) for k in kernel)
        channels, filters, groups = d.size(64), d.size(64), 1
        if d.chance(0.2):
            groups = d.pick((channels, 2))
            channels, filters = groups * -(-channels // groups), groups * d.pick((1, 1, 2, 3))
        shape = ConvGeometry(size, kernel, stride, padding, dilation, channels, filters, groups)
        if min(shape.output) > 0:
            return shape


def check_convolution(d: Draw, backend: Backend) -> Call:
    """Make one call of a convolution; check where its arrays have to be NaN and where not.

    Padding may be multiplied or not, so that filters and gradients that are NaN may make NaN of it.
    Winograd's algorithms make whole tiles NaN.
    """
    g, n, real = geometry(d), int(d.rng.integers(1, 4)), arithmetic(d.dtype)
    inside, outside = (n, *g.size, g.channels), (n, *g.output, g.filters)
    deferred = d.chance(0.3)
    x = d.deferred(inside) if deferred else d.array(inside)
    gradient = d.deferred(outside, relu=False) if d.chance(0.15) else d.array(outside)
    w = d.array(g.weight_shape) if d.chance(0.3) else d.numbers(g.weight_shape)
    kernel = d.pick(("forward", "backward_data", "backward_filter", "backward"))
    algorithm = d.pick(candidates(g, backend.isa in PAIRING and d.dtype == HALF))
    with np.errstate(all="ignore"):
        values, dy = (np.array(wide(NUMPY.fused.values(a)), "float64") for a in (x, gradient))
    filters = np.array(wide(w), "float64")
    direct = algorithm == "direct"
    if kernel == "forward":
        b = d.array(g.filters, real) if d.chance() else None
        options: dict[str, Any] = {"out": d.empty(outside), "relu": d.chance()}
        if deferred and d.chance():
            options["store"] = d.empty(inside)
        if not options["relu"] and d.chance():
            options["sums"] = d.empty(1 + 2 * g.filters, "float64")
        call = Call("conv", kernel, (x, w, b, g), options, algorithm)
        y = _run(call, backend)["out"]
        marks = _product("forward", values, filters, g, outside, b)
        _check_conv(
            call, backend, y, marks, direct, _bad(filters).reshape(g.filters, -1).any(axis=1)
        )
        return call
    add = {"accumulate": d.chance()}
    dw = d.empty(g.weight_shape, real)
    if kernel == "backward_filter":
        call = Call("conv", kernel, (x, gradient, g), {"out": dw, **add}, algorithm)
    elif kernel == "backward_data":
        call = Call("conv", kernel, (gradient, w, g), {"out": d.empty(inside)}, algorithm)
    else:
        call = Call("conv", kernel, (x, gradient, w, g), {"dx": d.empty(inside), "dw": dw, **add})
        call.algorithm = algorithm
    gate = None
    if kernel != "backward_filter" and d.chance():
        gate = x if kernel == "backward" and deferred else d.deferred(inside)
        if kernel == "backward" and not deferred:
            gate = None
    if kernel != "backward_filter":
        call.options["gate"] = gate
        if d.chance():
            call.options["add"] = d.array(inside)
        if gate is not None and d.chance():
            call.options["sums"] = d.empty((1 + len(gate.terms), g.channels), "float64")
    written = _run(call, backend)
    if kernel != "backward_data":
        found = written["dw" if kernel == "backward" else "out"]
        marks = _product("backward_filter", values, dy, g, dw.shape)
        edges = (1,) * len(g.kernel)
        read = _bad(values).reshape(-1, g.groups, 1, *edges, g.channels // g.groups).any(axis=0)
        made = _bad(dy).reshape(-1, g.groups, g.filters // g.groups, *edges, 1).any(axis=0)
        padded = (read | made).reshape(g.filters, *edges, -1)
        _check_conv(call, backend, found, marks, direct, padded)
    if kernel != "backward_filter":
        found = written["dx" if kernel == "backward" else "out"]
        marks = _product("backward_data", dy, filters, g, inside)
        extra = call.options.get("add")
        marked = []
        for mark in marks:
            total = np.where(mark, np.nan, 0)
            if extra is not None:
                bad = np.isnan(wide(extra)) if mark is marks[0] else _bad(extra)
                total = total + np.where(bad, np.nan, 0)
            if gate is not None and gate.relu:
                with np.errstate(all="ignore"):
                    v = wide(NUMPY.fused.values(gate))
                total = np.where((v <= 0) | ((v >= gate.limit) & (gate.limit < inf)), 0, total)
            marked.append(np.isnan(total))
        grouped = _bad(filters).reshape(g.groups, -1, g.channels // g.groups)
        _check_conv(call, backend, found, marked, direct, grouped.any(axis=1).reshape(-1))
    return call


def _run(call: Call, backend: Backend) -> dict[str, Any]:
    """Run a convolution on copies; return its options with what was written."""
    options = {name: _copied(value, []) for name, value in call.options.items()}
    args = [_copied(value, []) for value in call.args]
    if call.kernel == "backward" and call.options.get("gate") is call.args[0]:
        options["gate"] = args[0]
    with np.errstate(all="ignore"):
        getattr(backend.conv, call.kernel)(*args, **options, algorithm=call.algorithm)
        _compare_numbers(call, backend, options)
    if (sums := options.get("sums")) is not None:
        result = wide(options["dx" if call.kernel == "backward" else "out"])
        columns = np.isnan(result).reshape(-1, result.shape[-1]).any(axis=0)
        total = sums[1 : 1 + len(columns)] if sums.ndim == 1 else sums[0]
        lost = columns & ~np.isnan(total)
        assert not lost.any(), f"{backend.isa} {call}: NaN lost in sums, {places(lost)}"
    if (store := options.get("store")) is not None:
        with np.errstate(all="ignore"):
            exact = NUMPY.fused.values(call.args[0])
        same_specials(store, exact, f"{backend.isa} {call}, store")
    return options


def _compare_numbers(call: Call, backend: Backend, written: dict[str, Any]) -> None:
    """Compare what is finite with the reference, which computes with float64."""
    args, options = ([_copied(a, []) for a in call.args], dict(call.options))
    names = {"out", "dx", "dw"} & {*options}
    options |= {name: np.array(wide(call.options[name]), "float64") for name in names}
    if options.get("sums") is not None:
        options["sums"] = options["sums"].copy()
    if options.get("store") is not None:
        options["store"] = options["store"].copy()
    getattr(NUMPY.conv, call.kernel)(*args, **options)
    for name in names:
        value, exact = np.array(wide(written[name]), "float64"), options[name]
        known = np.isfinite(value) & np.isfinite(exact)
        error, norm = np.linalg.norm((value - exact)[known]), np.linalg.norm(exact[known])
        assert error <= 0.05 * norm + 0.05, f"{backend.isa} {call}: {name} is off by {error / norm}"


def _product(
    kernel: str, a: np.ndarray, b: np.ndarray, g: ConvGeometry, shape: Any, bias: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Where a convolution reads NaN, and where something that is not finite."""
    marks = []
    for bad in (np.isnan, _bad):
        out, count = np.empty(shape), np.zeros(shape)
        for first, second in ((bad(a), np.ones_like(b)), (np.ones_like(a), bad(b))):
            arrays = (np.asarray(first, "float64"), np.asarray(second, "float64"))
            given = (*arrays, None, g) if kernel == "forward" else (*arrays, g)
            getattr(NUMPY.conv, kernel)(*given, out=out)
            count += out
        if bias is not None:
            count += bad(bias)
        marks.append(count > 0)
    return marks[0], marks[1]


def _bad(array: np.ndarray) -> np.ndarray:
    return ~np.isfinite(wide(array))


def _check_conv(
    call: Call,
    backend: Backend,
    value: np.ndarray,
    marks: Any,
    direct: bool,
    padded: Any = np.False_,
) -> None:
    """Check one array; `padded` is where padding is multiplied by something not finite, or not."""
    value, (nan, bad) = np.asarray(wide(value), "float64"), marks
    what = f"{backend.isa} {value.dtype} {call}"
    lost = nan & ~np.isnan(value)
    assert not lost.any(), f"{what}: NaN lost at {places(lost)}, {value[lost][:3]}"
    if not call.options.get("relu"):
        lost = bad & np.isfinite(value)
        assert not lost.any(), f"{what}: infinity lost at {places(lost)}, {value[lost][:3]}"
    if direct:
        more = ~bad & ~np.isfinite(value) & ~padded
        assert not more.any(), f"{what}: {value[more][:3]} at {places(more)} without a reason"
