"""Kernels on 16-bit arrays: what float64 gives for the same numbers, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import (
    Backend,
    ConvGeometry,
    Deferred,
    PoolGeometry,
    Term,
    create_backend,
    report,
)
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import FAMILIES
from pydtnn.kernels.reference.attention import At, Dropped
from tests.conftest import instruction_sets
from tests.kernels.checks import REFERENCE
from tests.kernels.test_backend import COMBINED

HALVES = ("bfloat16", "float16")
FLOAT32 = 2e-5
"""Of the largest entry: what a sum of some hundred float32 may be off, and what is left where it
cancels."""

CONV = ConvGeometry((5, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4, 6, 2)
POOL = PoolGeometry((5, 6), (3, 2), (2, 1), ((1, 1), (0, 1)), 3)
X, Y, P = (3, 5, 6, 4), (3, *CONV.output, 6), (3, *POOL.output, 3)


class Arrays:
    """Draws the same numbers for every kernel: in a 16-bit type and its companions, or in float64.

    Parameters
    ----------
    dtype : str
        Of 16 bits.
    exact : bool
        Whether all arrays are float64, with the same numbers.
    """

    def __init__(self, dtype: str, *, exact: bool) -> None:
        self.rng = np.random.default_rng(0)
        self.exact = exact
        self.half, self.single = np.dtype(dtype), np.dtype("float32")

    def _as(self, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
        value = value.astype(dtype)
        return value.astype("float64") if self.exact else value

    def x(self, *shape: int) -> np.ndarray:
        """An activation."""
        return self._as(self.rng.normal(size=shape), self.half)

    def positive(self, *shape: int) -> np.ndarray:
        return self._as(self.rng.uniform(0.5, 2, size=shape), self.half)

    def p(self, *shape: int) -> np.ndarray:
        """A bias, or coefficients."""
        return self._as(self.rng.normal(size=shape), self.single)

    def sums(self, *shape: int) -> np.ndarray:
        return self.rng.uniform(0.5, 1.5, size=shape)

    def out(self, *shape: int) -> np.ndarray:
        """Memory for activations."""
        return np.full(shape, np.nan, "float64" if self.exact else self.half)

    def grad(self, *shape: int) -> np.ndarray:
        """Memory for the gradient of a parameter, with something in it."""
        return self.p(*shape)

    def deferred(self, *shape: int) -> Deferred:
        first = Term(self.x(*shape), self.p(shape[-1]), self.p(shape[-1]))
        return Deferred(first, Term(self.x(*shape)), shift=self.p(shape[-1]), relu=True)


Run = Callable[[Backend, Arrays], Any]
CASES: dict[str, Run] = {}


def case(name: str) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        CASES[name] = run
        return run

    return register


@case("linear.forward")
def _(b: Backend, a: Arrays) -> Any:
    x, w, bias, y = a.x(7, 300), a.x(5, 300), a.p(5), a.out(7, 5)
    b.linear.forward(x, w, bias, out=y)
    return y


@case("linear.backward_data")
def _(b: Backend, a: Arrays) -> Any:
    dy, w, dx = a.x(7, 5), a.x(5, 30), a.out(7, 30)
    b.linear.backward_data(dy, w, out=dx)
    return dx


@case("linear.backward_filter")
def _(b: Backend, a: Arrays) -> Any:
    x, dy, dw, added = a.x(700, 9), a.x(700, 5), a.grad(5, 9), a.grad(5, 9)
    b.linear.backward_filter(x, dy, out=dw)
    b.linear.backward_filter(x, dy, out=added, accumulate=True)
    return dw, added


@case("linear.backward_bias")
def _(b: Backend, a: Arrays) -> Any:
    dy, db, added = a.positive(2, 300, 5), a.grad(5), a.grad(5)  # a sum of bfloat16 ends at 256
    b.linear.backward_bias(dy, out=db)
    b.linear.backward_bias(dy, out=added, accumulate=True)
    return db, added


@case("linear.take_rows")
def _(b: Backend, a: Arrays) -> Any:
    w, y = a.x(5, 7), a.out(4, 7)
    b.linear.take_rows(w, np.array([3, 0, 3, 4]), out=y)
    return y


@case("linear.add_rows")
def _(b: Backend, a: Arrays) -> Any:
    dy, dw, added = a.positive(600, 7), a.grad(5, 7), a.grad(5, 7)
    b.linear.add_rows(dy, np.arange(600) % 4, out=dw)
    b.linear.add_rows(dy, np.arange(600) % 4, out=added, accumulate=True)
    return dw, added


@case("conv.forward")
def _(b: Backend, a: Arrays) -> Any:
    w, bias = a.x(*CONV.weight_shape), a.p(6)
    plain, deferred, store, sums = a.out(*Y), a.out(*Y), a.out(*X), a.sums(13)
    b.conv.forward(a.x(*X), w, bias, CONV, out=plain, relu=True)
    value = a.deferred(*X)
    b.conv.forward(value, w, None, CONV, out=deferred, store=store)
    b.conv.forward(store, w, None, CONV, out=a.out(*Y), sums=sums)
    return plain, store


@case("conv.backward_data")
def _(b: Backend, a: Arrays) -> Any:
    dy, w, add, dx, gated = a.x(*Y), a.x(*CONV.weight_shape), a.x(*X), a.out(*X), a.out(*X)
    b.conv.backward_data(dy, w, CONV, out=dx, add=add)
    b.conv.backward_data(dy, w, CONV, out=gated, gate=a.deferred(*X), sums=a.sums(3, 4))
    return dx, gated


@case("conv.backward_filter")
def _(b: Backend, a: Arrays) -> Any:
    x, dy, dw, added = a.x(*X), a.x(*Y), *(a.grad(*CONV.weight_shape) for _ in range(2))
    b.conv.backward_filter(x, dy, CONV, out=dw)
    b.conv.backward_filter(x, dy, CONV, out=added, accumulate=True)
    return dw, added


@case("conv.backward")
def _(b: Backend, a: Arrays) -> Any:
    x, dy, w, dw = a.x(*X), a.x(*Y), a.x(*CONV.weight_shape), a.grad(*CONV.weight_shape)
    dx = a.out(*X)
    b.conv.backward(x, dy, w, CONV, dx=dx, dw=dw)
    return dx, dw


@case("pool.max_forward")
def _(b: Backend, a: Arrays) -> Any:
    x, y, index = a.x(3, 5, 6, 3), a.out(*P), np.zeros(P, "uint8")
    b.pool.max_forward(x, POOL, out=y, index=index)
    return y, index


@case("pool.max_backward")
def _(b: Backend, a: Arrays) -> Any:
    dy, dx = a.x(*P), a.out(3, 5, 6, 3)
    b.pool.max_backward(dy, a.rng.integers(2, 4, P).astype("uint8"), POOL, out=dx)
    return dx


@case("pool.average_forward")
def _(b: Backend, a: Arrays) -> Any:
    x, y, inside = a.x(3, 5, 6, 3), a.out(*P), a.out(*P)
    b.pool.average_forward(x, POOL, out=y)
    b.pool.average_forward(x, POOL, out=inside, count_padding=False)
    return y, inside


@case("pool.average_backward")
def _(b: Backend, a: Arrays) -> Any:
    dy, dx = a.x(*P), a.out(3, 5, 6, 3)
    b.pool.average_backward(dy, POOL, out=dx, count_padding=False)
    return dx


@case("pool.adaptive_forward")
def _(b: Backend, a: Arrays) -> Any:
    x, y, whole = a.positive(2, 50, 40, 3), a.out(2, 3, 3, 3), a.out(2, 1, 1, 3)
    b.pool.adaptive_forward(x, out=y)
    b.pool.adaptive_forward(x, out=whole)
    return y, whole


@case("pool.adaptive_backward")
def _(b: Backend, a: Arrays) -> Any:
    dy, dx = a.x(2, 3, 3, 3), a.out(2, 5, 7, 3)
    b.pool.adaptive_backward(dy, out=dx)
    return dx


@case("norm.statistics")
def _(b: Backend, a: Arrays) -> Any:
    x, sums = a.positive(3, 400, 5), a.sums(11)
    b.norm.statistics(x, out=sums)
    return sums


@case("norm.normalize")
def _(b: Backend, a: Arrays) -> Any:
    x, y = a.x(30, 5), a.out(30, 5)
    b.norm.normalize(x, a.sums(5), a.sums(5), out=y)
    return y


@case("norm.backward_statistics")
def _(b: Backend, a: Arrays) -> Any:
    sums = a.sums(2, 5)
    b.norm.backward_statistics(a.x(400, 5), a.x(400, 5), a.sums(5), a.sums(5), out=sums)
    return sums


@case("norm.backward_normalize")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    b.norm.backward_normalize(a.x(30, 5), a.x(30, 5), a.p(5), a.p(5), a.p(5), out=dx)
    return dx


@case("norm.coefficients")
def _(b: Backend, a: Arrays) -> Any:
    sums, moments, maps = a.sums(11), a.sums(2, 5), a.grad(3, 5)
    b.norm.coefficients(sums, a.p(5), a.p(5), 1e-3, moments=moments, out=maps)
    return moments, maps[:2]  # the shift makes up for what was rounded of the pivot


@case("norm.backward_coefficients")
def _(b: Backend, a: Arrays) -> Any:
    moments, maps, dgamma, dbeta = a.sums(2, 5), a.grad(3, 5), a.grad(5), a.grad(5)
    given = a.sums(2, 5), 30.0, moments, a.p(5), a.p(5)
    b.norm.backward_coefficients(*given, dgamma=dgamma, dbeta=dbeta, out=maps, accumulate=True)
    return maps, dgamma, dbeta


@case("norm.group_forward")
def _(b: Backend, a: Arrays) -> Any:
    x, y, mean, inv_std = a.x(3, 20, 6), a.out(3, 20, 6), a.sums(3, 2), a.sums(3, 2)
    b.norm.group_forward(x, a.p(6), a.p(6), 2, 1e-3, out=y, mean=mean, inv_std=inv_std)
    return y, mean, inv_std


@case("norm.group_backward")
def _(b: Backend, a: Arrays) -> Any:
    dx, dgamma, dbeta = a.out(3, 20, 6), a.grad(6), a.grad(6)
    given = a.x(3, 20, 6), a.x(3, 20, 6), a.p(6), 2, a.sums(3, 2), a.sums(3, 2)
    b.norm.group_backward(*given, out=dx, dgamma=dgamma, dbeta=dbeta)
    return dx, dgamma, dbeta


@case("norm.rms_forward")
def _(b: Backend, a: Arrays) -> Any:
    x, y, inv_rms = a.x(60, 6), a.out(60, 6), a.sums(60, 1)
    b.norm.rms_forward(x, a.p(6), 1e-3, out=y, inv_rms=inv_rms)
    return y, inv_rms


@case("norm.rms_backward")
def _(b: Backend, a: Arrays) -> Any:
    dx, dgamma = a.out(60, 6), a.grad(6)
    b.norm.rms_backward(a.x(60, 6), a.x(60, 6), a.p(6), a.sums(60, 1), out=dx, dgamma=dgamma)
    return dx, dgamma


@case("fused.evaluate")
def _(b: Backend, a: Arrays) -> Any:
    y = a.out(30, 5)
    b.fused.evaluate(a.deferred(30, 5), out=y)
    return y


@case("fused.gate")
def _(b: Backend, a: Arrays) -> Any:
    dx, sums = a.out(30, 5), a.sums(3, 5)
    b.fused.gate(a.x(30, 5), a.deferred(30, 5), out=dx, add=a.x(30, 5), sums=sums)
    return dx


@case("fused.values")
def _(b: Backend, a: Arrays) -> Any:
    return b.fused.values(a.deferred(30, 5))


POSITIVE = (
    *("relu", "relu6", "leaky_relu", "elu", "sigmoid", "tanh", "arctan", "log", "gelu"),
    "gelu_exact",
)
"""Activations of positive numbers."""


@case("elementwise.forward")
def _(b: Backend, a: Arrays) -> Any:
    results = []
    for name in POSITIVE:
        results.append(a.out(30, 5))
        b.elementwise.forward(name, a.positive(30, 5), out=results[-1], alpha=0.1)
    results.append(a.out(30, 5))
    b.elementwise.forward("silu", a.x(30, 5), out=results[-1])
    return results


@case("elementwise.backward")
def _(b: Backend, a: Arrays) -> Any:
    results = []
    for name in POSITIVE:
        results.append(a.out(30, 5))
        b.elementwise.backward(name, a.x(30, 5), a.positive(30, 5), out=results[-1], alpha=0.1)
    return results


@case("elementwise.add")
def _(b: Backend, a: Arrays) -> Any:
    y = a.out(30, 5)
    b.elementwise.add(a.x(30, 5), a.x(30, 5), out=y)
    return y


@case("elementwise.convert")
def _(b: Backend, a: Arrays) -> Any:
    narrow, wide = a.out(30, 5), a.grad(30, 5)
    b.elementwise.convert(a.p(30, 5), out=narrow)
    b.elementwise.convert(a.x(30, 5), out=wide, accumulate=True)
    return narrow, wide


@case("elementwise.softmax_forward")
def _(b: Backend, a: Arrays) -> Any:
    y = a.out(30, 500)
    b.elementwise.softmax_forward(a.x(30, 500), out=y)
    return y


@case("elementwise.softmax_backward")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    b.elementwise.softmax_backward(a.x(30, 5), a.x(30, 5), out=dx)
    return dx


@case("loss.cross_entropy")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    target = a.rng.integers(0, 5, 30)
    return np.array([b.loss.cross_entropy(a.x(30, 5), target, 0.1, 0.5, out=dx)]), dx


@case("loss.hinge")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    return np.array([b.loss.hinge(a.x(30, 5), a.rng.integers(0, 5, 30), 0.5, out=dx)]), dx


@case("loss.weighted_cross_entropy")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    target, weights = a.rng.integers(0, 5, 30), abs(a.p(5))
    loss = b.loss.weighted_cross_entropy(a.x(30, 5), target, weights, 2, 0.1, 0.5, out=dx)
    return np.array([loss]), dx


@case("loss.binary_cross_entropy")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    return np.array([b.loss.binary_cross_entropy(a.x(30, 5), a.positive(30, 5), 0.5, out=dx)]), dx


@case("norm.local_response_forward")
def _(b: Backend, a: Arrays) -> Any:
    y = a.out(30, 9)
    b.norm.local_response_forward(a.x(30, 9), 4, 0.3, 0.75, 2.0, out=y)
    return y


@case("norm.local_response_backward")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 9)
    b.norm.local_response_backward(a.x(30, 9), a.x(30, 9), 4, 0.3, 0.75, 2.0, out=dx)
    return dx


@case("loss.squared_error")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    return np.array([b.loss.squared_error(a.x(30, 5), a.x(30, 5), 0.5, out=dx)]), dx


@case("loss.absolute_error")
def _(b: Backend, a: Arrays) -> Any:
    dx = a.out(30, 5)
    return np.array([b.loss.absolute_error(a.x(30, 5), a.x(30, 5), 0.5, out=dx)]), dx


@case("random.dropout")
def _(b: Backend, a: Arrays) -> Any:
    y = a.out(30, 5)
    b.random.dropout(a.x(30, 5), 0.3, 1, 2, 3, np.arange(30), out=y)
    return y


@case("attention.forward")
def _(b: Backend, a: Arrays) -> Any:
    y, causal, log_sums = a.out(3, 20, 8), a.out(3, 20, 8), a.grad(3, 2, 20)
    b.attention.forward(a.x(3, 20, 24), 2, out=causal, log_sums=a.grad(3, 2, 20), causal=True)
    b.attention.forward(a.x(3, 20, 24), 2, out=y, log_sums=log_sums)
    return y, causal, log_sums


@case("attention.backward")
def _(b: Backend, a: Arrays) -> Any:
    dy, qkv, y, log_sums = a.x(3, 20, 8), a.x(3, 20, 24), a.x(3, 20, 8), 3 + a.p(3, 2, 20)
    dropout = Dropped(0.3, 1, 2, 3, np.arange(3))
    dqkv = a.out(3, 20, 24)
    b.attention.backward(dy, qkv, y, log_sums, 2, out=dqkv, dropout=dropout)
    return dqkv


@case("attention.forward_block")
def _(b: Backend, a: Arrays) -> Any:
    y, log_sums = a.out(3, 20, 8), a.grad(3, 2, 20)
    at = At(5, 2, 25)
    b.attention.forward_block(
        a.x(3, 20, 8), a.x(3, 9, 16), 2, at, out=y, log_sums=log_sums, causal=True
    )
    return y, log_sums


@case("attention.backward_block")
def _(b: Backend, a: Arrays) -> Any:
    dy, q, kv, y = a.x(3, 20, 8), a.x(3, 20, 8), a.x(3, 9, 16), a.x(3, 20, 8)
    log_sums, at = 3 + a.p(3, 2, 20), At(5, 2, 25)
    dq, dkv = a.out(3, 20, 8), a.out(3, 9, 16)
    b.attention.backward_block(dy, q, kv, y, log_sums, 2, at, out=dq, out_kv=dkv)
    return dq, dkv


@pytest.mark.few(129)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kernel", CASES)
@pytest.mark.parametrize("name", ["numpy", *instruction_sets()])
def test_a_kernel_computes_in_float32_and_rounds_once(name: str, kernel: str, dtype: str) -> None:
    run = CASES[kernel]
    isa = {} if name == "numpy" else {"isa": name}
    backend = create_backend("cpu" if isa else name, threads=1, **isa)
    got = run(backend, Arrays(dtype, exact=False))
    want = run(REFERENCE, Arrays(dtype, exact=True))
    pairs = [(got, want)] if isinstance(got, np.ndarray) else zip(got, want, strict=True)
    for result, exact in pairs:
        if result.dtype.kind in "iu":
            np.testing.assert_array_equal(result, exact)
            continue
        assert np.isfinite(exact).all()
        error = abs(result.astype("float64") - exact)
        allowed = FLOAT32 * abs(exact).max()
        if result.dtype == dtype:
            allowed = allowed + 0.5 * np.spacing(abs(exact).astype(dtype)).astype("float64")
        assert (error <= allowed).all(), (error / allowed).max()


def test_no_kernel_is_left_out() -> None:
    single = {"update", "recurrent"}  # their arrays are float32
    kernels = {k for k in report(REFERENCE) if k.split(".")[0] not in single}
    others = {"norm.fold", "norm.constant_sums", "norm.moments"}  # on float64
    others |= {"conv.takes_sums", "norm.sums_length"}  # on nothing
    others |= {"elementwise.exponents", "elementwise.round"}  # on float32
    others |= {"attention.product"}  # on what attention has widened
    assert kernels - others - COMBINED == set(CASES)
    assert {k.split(".")[0] for k in kernels} == set(FAMILIES) - single


def test_types_are_computed_with_at_least_float32() -> None:
    assert [arithmetic(d).name for d in ("float16", "bfloat16", "float32", "float64")] == [
        *("float32", "float32", "float32", "float64")
    ]
