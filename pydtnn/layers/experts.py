"""Mixtures of experts: each token is computed by a few of many MLPs, which a router chooses."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext, toggled
from pydtnn.layers.blocks import Block, GraphBuilder
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.linear import Linear
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Parameter
from pydtnn.utils.validate import check_bool, check_float, check_int


class Routes(NamedTuple):
    """The experts of n tokens.

    Attributes
    ----------
    probabilities : Array, shape (n, E)
        Softmax of the logits.
    log_sums : Array, shape (n,)
        Logarithms of the sums of exponentials of the logits.
    chosen : Array of int, shape (n, k)
        Experts of each token, from the most probable one.
    weights : Array, shape (n, k)
    slots : Array of int, shape (R,)
        Indices of ``chosen``, flat, without those beyond a capacity: by expert, then by token.
    counts : ndarray of int, shape (E,)
        Slots of each expert, on the host.
    """

    probabilities: Array
    log_sums: Array
    chosen: Array
    weights: Array
    slots: Array
    counts: np.ndarray


class Experts(Layer):
    """``y = sum_j w_j MLP_j(x)`` of each token, over the k experts j with the largest logits.

    The weights are ``w_j = p_j`` for one choice and ``w_j = p_j / sum_i p_i`` of the chosen ones
    otherwise, where p is the softmax of the logits over all experts. The MLP of an expert is
    ``down gelu(up x + up_bias) + down_bias``, or ``down (silu(gate x) * (up x))`` if `gated`.

    With a capacity, an expert computes in training at most ``ceil(capacity k T / E)`` tokens of a
    sample, the first ones; others have no term of this expert. Samples are independent of each
    other, and so are positions of those after them.

    For each sample, `balance` times ``E sum_e f_e P_e`` is added to the loss in training, where f_e
    is the part of the choices of this sample that are e, and P_e the mean of p_e over its tokens;
    and `z` times the mean of the squared logarithm of the sum of exponentials of the logits.

    Parameters
    ----------
    hidden : int
        Features H inside each expert.
    choices : int
        Experts k of a token.
    capacity : float, optional
        Of an expert, relative to the mean number of tokens; by default, no token is dropped.
    gated : bool
    balance, z : float
        Weights of the two losses; at least 0.
    initializer, last_initializer : str or Initializer
        Of the matrices, and of those whose products are the output.

    Notes
    -----
    Inputs ``(N, T, D)`` and, of the router, ``(N, T, E)``; output ``(N, T, D)``. Parameters ``up
    (E, H, D)``, ``up_bias (E, H)``, ``down (E, D, H)``, ``down_bias (E, D)``; if gated, ``gate (E,
    H, D)``, ``up`` and ``down``.

    References
    ----------
    Lepikhin et al., "GShard", ICLR 2021, section 2.2 (groups of tokens with a capacity, here
    samples). Fedus et al., "Switch transformers", JMLR 2022, section 2.2 (one choice, the loss that
    balances). Zoph et al., "ST-MoE", 2022, section 3.3 (z). Jiang et al., "Mixtral of experts",
    2024, section 2.1 (gated; no token is dropped).
    """

    saves: tuple[str, ...] = ("input",)
    new_results = RESULTS

    def __init__(
        self,
        hidden: int,
        *,
        choices: int = 2,
        capacity: float | None = None,
        gated: bool = False,
        balance: float = 0.01,
        z: float = 0.001,
        initializer: str | Initializer = "glorot_uniform",
        last_initializer: str | Initializer = "glorot_uniform",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.hidden = check_int(who, "hidden", hidden, at_least=1)
        self.choices = check_int(who, "choices", choices, at_least=1)
        self.capacity = (
            None if capacity is None else check_float(who, "capacity", capacity, above=0)
        )
        self.gated = check_bool(who, "gated", gated)
        self.balance = check_float(who, "balance", balance, at_least=0)
        self.z = check_float(who, "z", z, at_least=0)
        self.supports = toggled(self.supports, "penalties", self.balance > 0 or self.z > 0)
        self.initializer, self.last_initializer = initializer, last_initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare the matrices of all experts."""
        lengths = {shape[:-1] for shape in shapes}
        if len(shapes) != 2 or {*map(len, shapes)} != {2} or len(lengths) != 1:
            raise self.fail(
                "expected tokens (T, D) and the router's logits (T, E), got "
                f"{' and '.join(map(str, shapes))}"
            )
        (_, features), (_, self.experts) = shapes
        if self.experts < self.choices:
            raise self.fail(
                f"choices must be at most the number of experts, {self.experts}, got {self.choices}"
            )
        own, hidden = self.own_experts(), self.hidden

        def matrices(name: str, outputs: int, inputs: int, initializer: Any) -> Parameter:
            fans: Any = {"fan_in": inputs, "fan_out": outputs}
            return self.parameter(name, (own, outputs, inputs), initializer, **fans, form="stack")

        self.up = matrices("up", hidden, features, self.initializer)
        if self.gated:
            self.gate = matrices("gate", hidden, features, self.initializer)
        self.down = matrices("down", features, hidden, self.last_initializer)
        if not self.gated:
            self.up_bias, self.down_bias = (
                self.parameter(f"{name}_bias", (own, n), "zeros", decay=False)
                for name, n in (("up", hidden), ("down", features))
            )
        return shapes[0]

    def own_experts(self) -> int:
        """Return the number of experts whose matrices this layer has."""
        return self.experts

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the rows of each expert together, and add up those of each token."""
        x, logits = xs
        routes = self.route(logits, context)
        results, kept = self.compute(self.rows_of(x, routes), routes.counts)
        y, own = self.combine(results, routes, x)
        value, shares = self.penalty(routes, len(x), context)
        return y, (routes, kept, own, self.penalise(value, shares, context))

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, Array]:
        """Compute the gradients of rows, experts, weights and logits."""
        routes, kept, own, penalties = saved
        dresults, dlogits = self.split(dy, own, routes, penalties)
        return self.join(self.compute_backward(dresults, kept), routes, dy), dlogits

    # -- routes -----------------------------------------------------------------------------------

    def route(self, logits: Array, context: StepContext) -> Routes:
        """Choose the experts of each token, and sort the choices by expert."""
        xp, (samples, length, experts) = self.xp, logits.shape
        scores, count = logits.reshape(-1, experts), self.choices  # (N, T, E) -> (n, E)
        top = scores.max(axis=1, keepdims=True)
        p = xp.exp(scores - top)
        total = p.sum(axis=1, keepdims=True)
        p /= total
        log_sums = (top + xp.log(total))[:, 0]
        if self.backend.has_values:
            chosen = xp.argsort(-scores, axis=1, kind="stable")[:, :count]
        else:  # all experts alike
            chosen = xp.arange(length * count).reshape(length, count) % experts
            chosen = xp.tile(chosen, (samples, 1))
        weights = xp.take_along_axis(p, chosen, axis=1)
        if count > 1:
            weights /= weights.sum(axis=1, keepdims=True)
        of = chosen.reshape(-1)
        slots = xp.arange(len(of))
        if self.capacity is not None and context.training:
            places = self.is_chosen(chosen, samples).cumsum(axis=1).reshape(-1, experts)
            limit = ceil(self.capacity * length * count / experts)
            slots = slots[xp.take_along_axis(places, of[:, None], axis=1)[:, 0] <= limit]
        slots = slots[xp.argsort(of[slots], kind="stable")]
        counts = self.backend.to_numpy(xp.bincount(of[slots], minlength=experts))
        return Routes(p, log_sums, chosen, weights, slots, counts)

    def is_chosen(self, chosen: Array, samples: int) -> Array:
        """Return for each choice of each sample, and each expert, whether it is this one."""
        rows = self.input_shapes[0][0] * self.choices  # (n, k) -> (N, T k, E)
        return chosen.reshape(samples, rows, 1) == self.xp.arange(self.experts)

    def penalty(
        self, routes: Routes, samples: int, context: StepContext
    ) -> tuple[Number, Array | None]:
        """Return the weighted losses of own samples, and f (N, E); 0 and None without losses."""
        if context.penalties is None or "penalties" not in self.supports:
            return 0.0, None
        length = self.input_shapes[0][0]
        shares = self.is_chosen(routes.chosen, samples).mean(axis=1)
        means = routes.probabilities.reshape(samples, length, self.experts).mean(axis=1)
        balance = self.experts * (shares * means).sum(dtype="float64")
        squares = (routes.log_sums**2).sum(dtype="float64") / length
        return self.balance * balance + self.z * squares, shares

    def penalise(
        self, value: Number, shares: Array | None, context: StepContext
    ) -> tuple[Array, Number] | None:
        """Add losses to those of the step; return what backward requires."""
        if shares is None or context.penalties is None:
            return None
        if not context.recomputing:
            context.penalties.values.append(value)
        return shares, context.penalties.scale

    # -- tokens to rows of experts, and back ------------------------------------------------------

    def rows_of(self, x: Array, routes: Routes) -> Array:
        """Return the tokens of all slots (R, D)."""
        return x.reshape(-1, x.shape[-1])[routes.slots // self.choices]

    def choices_of(self, rows: Array, routes: Routes) -> Array:
        """Return the row of each choice of each token (n, k, D), 0 for those that are dropped."""
        tokens, features = len(routes.chosen), rows.shape[1]
        of = self.backend.zeros((tokens * self.choices, features), rows.dtype)
        of[routes.slots] = rows
        return of.reshape(tokens, self.choices, features)

    def combine(self, results: Array, routes: Routes, x: Array) -> tuple[Array, Array]:
        """Return the outputs, and the terms of each token that they are the sums of."""
        own = self.choices_of(results, routes)
        return (own * routes.weights[:, :, None]).sum(axis=1).reshape(x.shape), own

    def split(
        self, dy: Array, own: Array, routes: Routes, penalties: tuple[Array, Number] | None
    ) -> tuple[Array, Array]:
        """Return the gradients of the results of experts (R, D), and of the logits."""
        xp, length = self.xp, dy.shape[1]
        rows = dy.reshape(-1, dy.shape[-1])
        weights = routes.weights.reshape(-1)[routes.slots]
        dresults = rows[routes.slots // self.choices] * weights[:, None]
        dw = (own * rows[:, None]).sum(axis=2)  # (n, k)
        p = routes.probabilities
        dlogits = self.backend.zeros(p.shape, p.dtype)
        mean = (dw * routes.weights).sum(axis=1, keepdims=True)
        at = xp.arange(len(p))[:, None], routes.chosen
        if self.choices > 1:  # a softmax of the chosen logits
            dlogits[at] = routes.weights * (dw - mean)
        else:
            dlogits[at] = mean
            dlogits -= p * mean
        if penalties is not None:
            shares, scale = penalties
            dp = xp.repeat(shares, length, axis=0) * (self.balance * self.experts / length)
            dp -= (p * dp).sum(axis=1, keepdims=True)
            dp += (2 * self.z / length) * routes.log_sums[:, None]
            dlogits += (scale * (p * dp)).astype(p.dtype)
        return dresults, dlogits.reshape(-1, length, self.experts)

    def join(self, dxs: Array, routes: Routes, dy: Array) -> Array:
        """Add up the gradients of each token's rows."""
        return self.choices_of(dxs, routes).sum(axis=1).reshape(dy.shape)

    # -- the MLPs ---------------------------------------------------------------------------------

    def compute(self, rows: Array, counts: np.ndarray) -> tuple[Array, Saved]:
        """Return the results (R, D) of rows that are sorted by expert."""
        linear, empty, dtype = self.backend.linear, self.backend.empty, rows.dtype
        hidden = [empty((len(rows), self.hidden), dtype) for _ in range(1 + self.gated)]
        results = empty(rows.shape, dtype)
        parts = self._parts(counts)
        for e, part in parts:
            bias = None if self.gated else self.up_bias.value[e]
            linear.forward(rows[part], self.up.value[e], bias, out=hidden[0][part])
            if self.gated:
                linear.forward(rows[part], self.gate.value[e], None, out=hidden[1][part])
        active = self._activate(hidden)
        for e, part in parts:
            bias = None if self.gated else self.down_bias.value[e]
            linear.forward(active[part], self.down.value[e], bias, out=results[part])
        return results, (rows, hidden, counts)

    def _parts(self, counts: np.ndarray) -> list[tuple[int, slice]]:
        ends = [0, *np.cumsum(counts).tolist()]
        return [(e, slice(*ends[e : e + 2])) for e in range(len(counts))]

    def _activate(self, hidden: list[Array]) -> Array:
        last = hidden[-1]
        active = self.backend.empty(last.shape, last.dtype)
        self.backend.elementwise.forward("silu" if self.gated else "gelu", last, out=active)
        if self.gated:
            self.xp.multiply(active, hidden[0], out=active)
        return active

    def compute_backward(self, dresults: Array, saved: Saved) -> Array:
        """Write the gradients of all parameters; return those of the rows."""
        linear, empty = self.backend.linear, self.backend.empty
        rows, hidden, counts = saved
        parts, active = self._parts(counts), self._activate(hidden)
        dactive = empty(active.shape, active.dtype)
        for e, part in parts:
            linear.backward_data(dresults[part], self.down.value[e], out=dactive[part])
            self._store(self.down, e, active[part], dresults[part])
            if not self.gated:
                self._store_bias(self.down_bias, e, dresults[part])
        dhidden = self._activate_backward(dactive, hidden)
        dx = empty(rows.shape, rows.dtype)
        for e, part in parts:
            linear.backward_data(dhidden[0][part], self.up.value[e], out=dx[part])
            self._store(self.up, e, rows[part], dhidden[0][part])
            if self.gated:
                other = empty(dx[part].shape, dx.dtype)
                linear.backward_data(dhidden[1][part], self.gate.value[e], out=other)
                self.xp.add(dx[part], other, out=dx[part])
                self._store(self.gate, e, rows[part], dhidden[1][part])
            else:
                self._store_bias(self.up_bias, e, dhidden[0][part])
        return dx

    def _activate_backward(self, dactive: Array, hidden: list[Array]) -> list[Array]:
        elementwise, empty = self.backend.elementwise, self.backend.empty
        shape, dtype = dactive.shape, dactive.dtype
        if not self.gated:
            elementwise.backward("gelu", dactive, hidden[0], out=dactive)
            return [dactive]
        dup, dgate = empty(shape, dtype), dactive
        elementwise.forward("silu", hidden[1], out=dup)
        self.xp.multiply(dup, dactive, out=dup)
        self.xp.multiply(dactive, hidden[0], out=dgate)
        elementwise.backward("silu", dgate, hidden[1], out=dgate)
        return [dup, dgate]

    def _store(self, w: Parameter, expert: int, x: Array, dy: Array) -> None:
        if not w.frozen:
            out, linear = w.grad[expert], self.backend.linear
            linear.backward_filter(x, dy, out=out, accumulate=w.accumulate)

    def _store_bias(self, b: Parameter, expert: int, dy: Array) -> None:
        if not b.frozen:
            out, linear = b.grad[expert], self.backend.linear
            linear.backward_bias(dy, out=out, accumulate=b.accumulate)

    def expected_rows(self, tokens: int) -> int:
        """Return the rows that experts of this layer compute if all are chosen equally often."""
        return tokens * self.choices

    def cost(self, batch: int) -> Cost:
        """The products of all choices, and the activations; the router's softmax does not count."""
        length, features = self.output_shape
        rows, itemsize = self.expected_rows(batch * length), self.dtype.itemsize
        products = 2 * rows * features * self.hidden * (2 + self.gated)
        hidden = rows * self.hidden * (1 + self.gated)
        arrays = (
            2 * rows * features + 2 * hidden + sum(p.size for p in self.parameters)
        ) * itemsize
        return Cost(
            products + (6 if self.gated else 8) * rows * self.hidden,
            2 * products + (11 if self.gated else 16) * rows * self.hidden,
            arrays,
            2 * arrays,
        )


class MixtureOfExperts(Block):
    """A router, ``router.w (E, D)``, and `Experts`.

    Parameters
    ----------
    experts : int
        Number E of experts.
    hidden : int
        Features inside each expert.
    initializer : str or Initializer
        Of the router's matrix, and of those of the experts.
    name : str, optional
    **options
        The other arguments of `Experts`: `choices`, `capacity`, `gated`, ...

    Notes
    -----
    Input and output ``(N, T, D)``.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        *,
        initializer: str | Initializer = "glorot_uniform",
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name)
        count = check_int(type(self).__name__, "experts", experts, at_least=1)
        self._router = Linear(count, bias=False, initializer=initializer, name="router")
        self._experts = Experts(hidden, initializer=initializer, name="experts", **options)

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the router, and the experts to it; a second use shares their parameters."""
        if len(inputs) != 1:
            raise ValueError(f"MixtureOfExperts: expected one input, got {len(inputs)}")
        return graph.add(self._experts, *inputs, graph.add(self._router, *inputs))
