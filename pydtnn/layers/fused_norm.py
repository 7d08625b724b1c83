"""Fused batch norm, addition and ReLU, created by the fusion pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import Deferred, Term
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.kernels.reference.norm import NormGradient
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.communicating import TwoPhase
from pydtnn.layers.cost import Cost
from pydtnn.layers.fused_conv import Evaluation, FusedConv2d
from pydtnn.layers.norm import FLOAT64, BatchNorm, rows
from pydtnn.layers.repeatable import Repeatable


class Normalized(NamedTuple):
    """Normalisation of an input: number of rows; mean and 1 / deviation, (2, C) float64."""

    rows: Number
    moments: Array


class NormAddReLU(TwoPhase, Repeatable, Layer):
    """``relu(bn(x1) + bn(x2))``, where each batch norm, the second input and the ReLU are optional.

    The output is `Deferred`: the convolution that reads it computes it while packing its input, and
    in backward applies the ReLU mask to its gradient and computes the sums for batch norm. In the
    same way the gradient of a normalised input is computed by the preceding convolution. Other
    layers receive arrays.

    Parameters
    ----------
    parts : sequence of Layer
        The layers of the model that this one replaces, for their names and costs; their parameters
        and statistics become those of this layer.
    norms : sequence of BatchNorm or None
        One per input, one or two.
    relu : bool
    limit : float
        Of the ReLU: 6 for `ReLU6`.

    Attributes
    ----------
    folded : tuple of (FusedConv2d or None)
        The convolution whose output each input is, if the norm can be folded into it.
    keeps : bool
        Whether the output has more than one reader.
    reader : FusedConv2d or None
        The first reader, if it is a convolution, which computes the output and gates its gradient.
    drops, stays : bool
        Whether stored values of the output are dropped after forward, and whether they stay, so
        that those of a plain input may be dropped; set by the fusion pass.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
    """

    saves: tuple[str, ...] = ("input",)
    may_overwrite: tuple[str, ...] = ("dy",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits", "deferred")

    def can_replay(self) -> bool:
        """Return whether no norm is frozen, whose coefficients the array module computes."""
        return not any(norm is not None and norm.running.frozen for norm in self.norms)

    def __init__(
        self,
        parts: Sequence[Layer],
        norms: Sequence[BatchNorm | None],
        *,
        relu: bool,
        limit: float = inf,
    ) -> None:
        super().__init__(name=parts[0].name)
        self.parts = tuple(parts)
        self.norms = tuple(norms)
        self.relu, self.limit = relu, limit
        self.folded: tuple[FusedConv2d | None, ...] = (None,) * len(self.norms)
        self.keeps = self.drops = self.stays = False
        self.reader: FusedConv2d | None = None

    def bind(self, backend: Any, dtype: np.dtype, name: str, shapes: tuple[Shape, ...]) -> None:
        """Bind the layer with the parameters and statistics of the replaced layers."""
        super().bind(backend, dtype, name, shapes)
        own = [norm for norm in self.norms if norm is not None]
        self.parameters = [p for norm in own for p in norm.parameters]
        self.statistics = [s for norm in own for s in norm.statistics]

    def build(self, *shapes: Shape) -> Shape:
        """All inputs have the shape of the output."""
        self._nothing = self.backend.zeros((1, shapes[0][-1]), "float64")
        self._zeros = self.backend.zeros((shapes[0][-1],), self.parameter_dtype)
        return shapes[0]

    def forward_sums(self, *xs: Array | Deferred, context: StepContext) -> Array:
        """Return the sums of each batch norm, one after the other."""
        inputs = zip(xs, self.norms, strict=True)
        own = [self._sums(norm, x, context) for x, norm in inputs if norm is not None]
        return self.backend.xp.concatenate([self.backend.empty((0,), "float64"), *own])

    def forward(
        self, *xs: Array | Deferred, context: StepContext, total: Array | None = None
    ) -> tuple[Deferred, Saved]:
        """Compute the coefficients of the inputs; the layers that read them compute the values."""
        totals = iter(())  # of each norm
        if total is not None:
            width = self.backend.norm.sums_length(self.output_shape[-1], self.dtype)
            totals = iter(total.reshape(-1, width))
        terms: list[Term] = []
        moments: list[Normalized | None] = []
        shift: Array | None = None
        for x, norm, folded in zip(xs, self.norms, self.folded, strict=True):
            array = self.array(x)
            if norm is None or (folded is not None and folded.folds(context)):
                terms.append(Term(array))
                moments.append(None)
                continue
            m, map_ = self._normalized(norm, x, context, next(totals, None))
            pivot, factor, own = map_
            terms.append(Term(array, pivot, factor))
            moments.append(m)
            shift = own if shift is None else self._added(shift, own)
        y, saved = self._deferred(terms, shift, moments)
        y.sources = [x.source if isinstance(x, Deferred) else None for x in xs]
        return y, saved

    def kept(self, saved: Saved) -> Any:
        """Return the coefficients of the output, and the normalisation of each input."""
        y, moments = saved
        return [term[1:] for term in y.terms], y.shift, moments

    def forward_again(
        self, *xs: Array | Deferred, context: StepContext, kept: Any
    ) -> tuple[Deferred, Saved]:
        """Combine the inputs and the kept coefficients."""
        maps, shift, moments = kept
        terms = [Term(self.array(x), *map_) for x, map_ in zip(xs, maps, strict=True)]
        return self._deferred(terms, shift, moments)

    def _deferred(
        self, terms: list[Term], shift: Array | None, moments: list[Normalized | None]
    ) -> tuple[Deferred, Saved]:
        y = Deferred(*terms, shift=shift, relu=self.relu, limit=self.limit)
        y.keep, y.drops = self.keeps, self.drops
        y.zeros = self._zeros if self.stays else None
        return y, (y, moments)

    def _sums(self, norm: BatchNorm, x: Array | Deferred, context: StepContext) -> Array:
        """Return the sums of an input: those of the preceding convolution, or new ones."""
        taken = _computed_sums(x)
        return norm.forward_sums(self.array(x), context=context) if taken is None else taken

    def _normalized(
        self, norm: BatchNorm, x: Array | Deferred, context: StepContext, total: Array | None
    ) -> tuple[Normalized, Array]:
        """Return the normalisation of an input and its map: pivot, factor and shift, (3, C)."""
        own, map_ = self._per_channel(2, FLOAT64), self._per_channel(3, self.parameter_dtype)
        gamma, beta, epsilon = norm.gamma.value, norm.beta.value, norm.epsilon
        kernels = self.backend.norm
        given, taken = norm.given_sums(context, total), _computed_sums(x)
        if given is not None:
            sums, n = given
            kernels.coefficients(sums, gamma, beta, epsilon, moments=own, out=map_)
            return Normalized(n, own), map_
        collect = norm.running.sums
        if taken is not None:
            kernels.coefficients(
                taken, gamma, beta, epsilon, moments=own, out=map_, collect=collect
            )
        else:
            length = kernels.sums_length(self.output_shape[-1], self.dtype)
            kernels.statistics_coefficients(
                self.array(x),
                gamma,
                beta,
                epsilon,
                sums=self.backend.empty((length,), FLOAT64),
                moments=own,
                out=map_,
                collect=collect,
            )
        return Normalized(rows(x), own), map_

    def _per_channel(self, number: int, dtype: Any) -> Array:
        return self.backend.empty((number, self.output_shape[-1]), dtype)

    def backward(self, dy: Array | Deferred, saved: Saved) -> Any:
        """Differentiate the ReLU and each batch norm, in one call unless a convolution gated dy."""
        value, moments = saved
        value.restore()
        if isinstance(dy, Deferred) and dy.array is not None:
            return self.backward_rest((dy.array, dy.sums), saved)
        dy = self.array(dy)
        dz, sums = self.gradient_like(dy), self._per_channel(1 + len(value.terms), FLOAT64)
        norms = [
            None if norm is None or m is None else self._gradient(norm, m)
            for norm, m in zip(self.norms, moments, strict=True)
        ]
        self.backend.fused.gate_norms(dy, value, norms, out=dz, sums=sums)
        dxs = tuple(
            dz if norm is None else self._dx(dz, term, norm, sums)
            for norm, term in zip(norms, value.terms, strict=True)
        )
        return dxs if len(dxs) > 1 else dxs[0]

    def backward_sums(self, dy: Array | Deferred, saved: Saved) -> tuple[Any, Array]:
        """Differentiate the ReLU and compute the sums (1 + terms, C) for batch norm.

        A convolution may have computed both.
        """
        value = saved[0].restore()
        if isinstance(dy, Deferred) and dy.array is not None:
            return (dy.array, dy.sums), dy.sums.reshape(-1)
        dy = self.array(dy)
        sums, dz = self._per_channel(1 + len(value.terms), FLOAT64), self.gradient_like(dy)
        self.backend.fused.gate(dy, value, out=dz, sums=sums)
        return (dz, sums), sums.reshape(-1)

    def backward_rest(self, needed: Any, saved: Saved, total: Array | None = None) -> Any:
        """Differentiate each batch norm as `BatchNorm.backward` does."""
        (dz, own), (value, moments) = needed, saved
        whole = None if total is None else total.reshape(own.shape)
        dxs = tuple(
            dz
            if norm is None or m is None
            else self._backward_norm(norm, term, m, dz, self._pair(own, i), self._pair(whole, i))
            for i, (norm, term, m) in enumerate(
                zip(self.norms, value.terms, moments, strict=True), start=1
            )
        )
        return dxs if len(dxs) > 1 else dxs[0]

    def _added(self, a: Array, b: Array) -> Array:
        out = self.backend.empty(a.shape, a.dtype)
        self.backend.elementwise.add(a, b, out=out)
        return out

    def _pair(self, sums: Array | None, i: int) -> Any:
        """Return the sums of dz, and those of dz times the input of term `i`: (2, C)."""
        if sums is None or len(sums) == 2:
            return sums
        pair = self._per_channel(2, FLOAT64)
        self.backend.elementwise.convert(sums[0 : i + 1 : i], out=pair)
        return pair

    def _backward_norm(
        self,
        norm: BatchNorm,
        term: Term,
        m: Normalized,
        dz: Array,
        sums: Array,
        total: Array | None,
    ) -> Deferred:
        own = self._gradient(norm, m)
        self._differentiate(own, sums, term)
        if total is not None:  # of all shards: another map; its dgamma and dbeta are unused
            dgamma, dbeta = self._per_channel(2, self.parameter_dtype)
            other = own._replace(dgamma=dgamma, dbeta=dbeta, accumulate=False)
            self._differentiate(other, total, term)
        return self._dx(dz, term, own, sums)

    def _differentiate(self, norm: NormGradient, sums: Array, term: Term) -> None:
        rows, moments, gamma, dgamma, dbeta, map_, accumulate = norm
        self.backend.norm.backward_coefficients(
            sums,
            rows,
            moments,
            term.pivot,
            gamma,
            dgamma=dgamma,
            dbeta=dbeta,
            out=map_,
            accumulate=accumulate,
        )

    def _gradient(self, norm: BatchNorm, m: Normalized) -> NormGradient:
        """Return the gradient arrays of a norm and new memory for its map: (3, C)."""
        gamma, map_ = norm.gamma, self._per_channel(3, self.parameter_dtype)
        dgamma, dbeta = gamma.grad, norm.beta.grad
        return NormGradient(*m, gamma.value, dgamma, dbeta, map_, gamma.accumulate)

    def _dx(self, dz: Array, term: Term, norm: NormGradient, sums: Array) -> Deferred:
        a, b, c = norm.out
        dx = Deferred(Term(dz, None, a), Term(term.x, term.pivot, b), shift=c)
        # the gradient sums to zero over its own batch, but not with a constant running mean
        dx.sums = a * sums[:1] if norm.rows is inf else self._nothing
        return dx

    def cost(self, batch: int) -> Cost:
        """What the convolutions around it do not do.

        Forward sums inputs, and computes the output for a reader that is no convolution. Backward
        differentiates the ReLU, sums the gradients, and computes those of inputs.
        """
        (_, n), evaluation = self.elements(batch), self.evaluation
        makers = [conv is not None and conv.sums_for_norm(batch) for conv in self.folded]
        summed = sum(
            norm is not None and not norm.running.frozen and not made
            for norm, made in zip(self.norms, makers, strict=True)
        )
        alone = sum(
            norm is not None and conv is None
            for norm, conv in zip(self.norms, self.folded, strict=True)
        )
        evaluated = self.reader is None
        gates = self.reader is None or not (self.reader.finishes and self.backend.gates)
        terms, itemsize = len(self.norms), self.dtype.itemsize
        return Cost(
            (3 * summed + evaluated * evaluation.operations) * n,
            (gates * evaluation.differentiated + 4 * alone) * n,
            (summed + evaluated * (terms + 1)) * n * itemsize,
            (gates * (terms + 2) + 3 * alone) * n * itemsize,
        )

    @property
    def evaluation(self) -> Evaluation:
        """What the first reader does to compute the output."""
        norms, arrays = sum(norm is not None for norm in self.norms), len(self.norms)
        bounds = self.relu + (self.limit < inf)
        operations = 2 * norms + arrays - 1 + bounds
        fewer = self.drops or self.stays
        return Evaluation(arrays, operations, bounds + 5 * norms, self.keeps, fewer)


def _computed_sums(x: Array | Deferred) -> Array | None:
    """Return the sums of `x` that the preceding convolution computed."""
    return x.sums if isinstance(x, Deferred) else None
