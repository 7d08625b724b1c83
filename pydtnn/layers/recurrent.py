"""Recurrent layers: one direction of one layer, and stacks of layers in one or two directions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Saved, Shape, StepContext
from pydtnn.layers.blocks import Block, GraphBuilder
from pydtnn.layers.cost import Cost
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.initializers import Initializer, Uniform
from pydtnn.layers.merge import Concat
from pydtnn.layers.node import Node, Outputs
from pydtnn.layers.recomputed import Recomputed, kept, restored
from pydtnn.layers.reshape import Flatten, Slice
from pydtnn.layers.sequence import TakesLengths
from pydtnn.utils.validate import check_bool, check_float, check_int


class RecurrentLayer(TakesLengths):
    """Base class of a recurrent layer that goes through sequences in one direction.

    Parameters
    ----------
    features : int
        Size H of the state.
    reverse : bool
        Whether the steps go from the last position to the first.
    return_sequences : bool
        Whether the output has the states of all steps; otherwise it is that of the last step.
    return_states : bool
        Whether the output has further rows, those after all steps: h, and c of an LSTM.
    bias : bool
    initializer : str or Initializer, optional
        Of both matrices; by default uniform between ``-1 / sqrt(H)`` and ``1 / sqrt(H)``, as the
        biases always are.

    Notes
    -----
    Input ``(N, T, I)``, output ``(N, T, H)`` or ``(N, H)``; parameters ``w (G H, I)``, ``u (G H,
    H)``, ``b (G H,)`` and ``b_u (G H,)``, for G gates. With a second input ``(N, 1)``, the lengths
    of the samples, only their first positions exist: the last step is at the last of them, and
    outputs and gradients of the others are 0. The last inputs may be the states before the first
    step: h ``(N, H)``, and c of an LSTM; without them, these are zeros. With `return_states`, the
    output is ``(N, T + S, H)``, or ``(N, S, H)`` without `return_sequences`: its S last rows are
    the states after the last step, those before the first of a sample of length 0. Models of 16
    bits compute these layers in float32.
    """

    gates: ClassVar[int]
    carried: ClassVar[int]  # states, from step to step
    operations: ClassVar[tuple[int, int]]  # per unit and step besides products, in each direction
    saves: tuple[str, ...] = ("input", "output")
    new_results = RESULTS
    supports: tuple[str, ...] = ("recomputed",)

    def __init__(
        self,
        features: int,
        *,
        reverse: bool = False,
        return_sequences: bool = True,
        return_states: bool = False,
        bias: bool = True,
        initializer: str | Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.features = check_int(who, "features", features, at_least=1)
        self.reverse = check_bool(who, "reverse", reverse)
        self.looks_ahead = (0,) if self.reverse else ()
        self.return_sequences = check_bool(who, "return_sequences", return_sequences)
        self.return_states = check_bool(who, "return_states", return_states)
        self.bias = check_bool(who, "bias", bias)
        self.initializer = initializer

    def bind(self, backend: Backend, dtype: np.dtype, name: str, shapes: tuple[Shape, ...]) -> None:
        """Find out which inputs are states."""
        self.given = states_given(type(self).__name__, shapes, self.features, self.carried)
        self.sequences = 1 + self.given
        super().bind(backend, dtype, name, shapes)

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (G H, I), u (G H, H), b and b_u (G H,)."""
        length, inputs = self.sequence(shapes[: len(shapes) - self.given])
        rows, usual = self.gates * self.features, Uniform(self.features**-0.5)
        matrices = usual if self.initializer is None else self.initializer
        self.w = self.parameter("w", (rows, inputs), matrices)
        self.u = self.parameter("u", (rows, self.features), matrices)
        self.biases = [
            self.parameter(name, (rows,), usual, decay=False) for name in ("b", "b_u") if self.bias
        ]
        # Kernels that descend from T have no states at the last position of a shorter sample.
        self.turns = self.reverse and (self.given > 0 or self.return_states)
        self.descends = self.reverse and not self.turns
        self.steps = length * self.return_sequences
        self.ends = self.carried if self.return_states else int(not self.return_sequences)
        one = not self.steps and not self.return_states
        return (self.features,) if one else (self.steps + self.ends, self.features)

    def forward(self, *xs: Array | Recomputed, context: StepContext) -> tuple[Array, Saved]:
        """Compute the terms ``x w' + b`` of all steps, then the steps."""
        x, others = xs[0], [self.array(x) for x in xs[1:]]
        first = others[len(others) - self.given :]
        lengths = self.lengths(others[0], context) if len(others) > self.given else None
        n, length = x.shape[0], self.input_shapes[0][0]
        gates = self.empty(n, (length, self.w.shape[0]))
        states = self.empty(n, (length, self.features))
        extra = self.empty(n, (length, self.features))
        b, b_u = (p.value for p in self.biases) if self.bias else (None, self._no_bias())
        self.backend.linear.forward(_rows(self.array(x)), self.w.value, b, out=_rows(gates))
        gates = self._turned(gates, lengths)
        options = {"first": first, "reverse": self.descends, "lengths": lengths}
        self._forward_steps(gates, b_u, states, extra, **options)
        steps = self._turned(states, lengths)
        if not self.ends:
            return steps, (kept(x), gates, states, extra, options)
        y = self.empty(n, (self.steps + self.ends, self.features))
        y[:, : self.steps] = steps[:, : self.steps]
        for i, values in enumerate((states, extra)[: self.ends]):
            end = values[self._last(lengths, n)]
            if first and lengths is not None:
                end = self.xp.where((lengths > 0)[:, None], end, first[i])
            y[:, self.steps + i] = end
        return y.reshape(n, *self.output_shape), (kept(x), gates, states, extra, options)

    def backward(self, dy: Array, saved: Saved) -> Array | tuple[Array, ...] | None:
        """Compute the gradients of all terms step by step, then those of x, w, u and the biases."""
        linear, (x, gates, states, extra, options) = self.backend.linear, saved
        n, lengths, first = len(dy), options["lengths"], options["first"]
        dfirst = [self.empty(n, (self.features,)) for _ in first]
        rows = dy.reshape(n, self.steps + self.ends, self.features)
        ends = rows[:, self.steps :]
        dy = self._turned(rows[:, : self.steps], lengths)
        if self.ends:
            steps, dy = dy, self.backend.zeros(states.shape, self.dtype)
            dy[:, : self.steps] = steps
            dy[self._last(lengths, n)] += ends[:, 0]
        of_input, of_state = self._backward_steps(
            dy, gates, states, extra, ends, dfirst=dfirst, **options
        )
        if first and self.ends and lengths is not None:
            dfirst[0] += self.xp.where((lengths > 0)[:, None], 0, ends[:, 0])
        if not self.u.frozen:
            before = _rows(self._states_before(states, first))
            u = self.u
            linear.backward_filter(before, _rows(of_state), out=u.grad, accumulate=u.accumulate)
            del before
        self._backward_biases(of_input, of_state)
        of_input = self._turned(of_input, lengths)
        if not self.w.frozen:
            inputs, w = _rows(restored(x)), self.w
            linear.backward_filter(inputs, _rows(of_input), out=w.grad, accumulate=w.accumulate)
            del inputs
        dx = None
        if self.needs_dx:
            dx = self.empty(n, self.input_shapes[0])
            linear.backward_data(_rows(of_input), self.w.value, out=_rows(dx))
        if len(self.input_shapes) == 1:
            return dx
        no_lengths = [] if lengths is None else [self.backend.zeros((n, 1), self.dtype)]
        return dx, *no_lengths, *dfirst

    @abstractmethod
    def _forward_steps(
        self, gates: Array, b: Array, states: Array, extra: Array, **options: Any
    ) -> None:
        """Replace the terms in `gates` by the gates, and compute the states."""

    @abstractmethod
    def _backward_steps(
        self, dy: Array, gates: Array, states: Array, extra: Array, ends: Array, **options: Any
    ) -> tuple[Array, Array]:
        """Return the gradients of the terms of the input, and of the state.

        `ends` (N, S, H) are those of the states after the last step, of which `dy` includes h.
        """

    def _backward_biases(self, of_input: Array, of_state: Array) -> None:
        """Sum the gradients of the terms; where they are the same, once."""
        trained = [p for p in self.biases if not p.frozen]
        if not trained:
            return
        sums = self.backend.empty(trained[0].shape, self.dtype)
        self.backend.linear.backward_bias(_rows(of_state), out=sums)
        for p in trained:
            if p is self.biases[0] and of_input is not of_state:
                linear = self.backend.linear
                linear.backward_bias(_rows(of_input), out=p.grad, accumulate=p.accumulate)
            else:
                p.store_grad(sums)

    def _no_bias(self) -> Array:
        return self.backend.zeros((self.gates * self.features,), self.dtype)

    def _last(self, lengths: Array | None, n: int) -> Any:
        """Return the index of the states of the last step."""
        if self.descends:
            return slice(None), 0
        if lengths is None:
            return slice(None), -1
        return self.xp.arange(n), self.xp.maximum(lengths - 1, 0)

    def _turned(self, values: Array, lengths: Array | None) -> Array:
        """Return the existing positions in the opposite order, if kernels receive them so."""
        if not self.turns:
            return values
        if lengths is None:
            return self.xp.ascontiguousarray(values[:, ::-1])
        n, t = len(values), self.xp.arange(values.shape[1])
        ends = lengths[:, None]
        return values[self.xp.arange(n)[:, None], self.xp.where(t < ends, ends - 1 - t, t)]

    def _states_before(self, states: Array, given: Sequence[Array]) -> Array:
        """Return the states that the steps have read."""
        before = self.backend.empty(states.shape, self.dtype)
        first = -1 if self.descends else 0
        source, target = (slice(1, None), slice(None, -1))[:: 1 if self.descends else -1]
        before[:, target], before[:, first] = states[:, source], given[0] if given else 0
        return before

    def cost(self, batch: int) -> Cost:
        """Products of ``2 G H (I + H)`` operations per step, with the biases, and the gates.

        All samples count with the length T. The gates are written over the terms.
        """
        length, inputs = self.input_shapes[0]
        steps, itemsize = batch * length, self.dtype.itemsize
        rows, units = steps * self.w.shape[0], steps * self.features
        of_w, of_u = 2 * inputs * rows, 2 * self.features * rows
        forward, backward = self.operations
        dw, du, dx = not self.w.frozen, not self.u.frozen, self.needs_dx
        summed = sum(not p.frozen for p in self.biases)
        x, w, u, last = steps * inputs, self.w.size, self.u.size, not self.return_sequences
        different = self.operations == GRULayer.operations  # gradients of both kinds of terms
        sums = min(summed, 1 + different)
        read = x + w + rows + 2 * rows + u + 2 * units + 2 * last * batch * self.features
        steps_back = (2 + different) * rows + u + (2 + different) * units + 2 * last * units
        copied = 2 * units * self.return_states + 2 * (rows + units) * self.turns
        products = dw * (x + rows + w) + du * (3 * units + rows + u) + dx * (rows + w + x)
        return Cost(
            of_w + of_u + forward * units,
            of_w * (dw + dx) + of_u * (1 + du) + backward * units + rows * sums,
            (read + copied) * itemsize,
            (steps_back + products + sums * rows + copied) * itemsize,
        )


class LSTMLayer(RecurrentLayer):
    """One direction of a layer of long short-term memory.

    ``i, f, o = sigmoid(x w' + b + h' u' + b_u)`` and ``g = tanh(...)``, in the rows of `w` and `u`
    in the order i, f, g, o; ``c = f c' + i g``, ``h = o tanh(c)``. States before the first step are
    zeros. The parameters are those of `RecurrentLayer`.

    Raises
    ------
    ValueError
        In `forward`, if a length is not a whole number in 0..T: with the sample and the value.

    References
    ----------
    Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997; with forget
    gates: Gers, Schmidhuber and Cummins, "Learning to forget", Neural Computation 12(10), 2000.
    """

    gates = 4
    carried = 2
    operations = (13, 24)

    def _forward_steps(
        self, gates: Array, b: Array, states: Array, extra: Array, **options: Any
    ) -> None:
        self.backend.recurrent.lstm_forward(
            gates, self.u.value, b, out=states, cells=extra, **options
        )

    def _backward_steps(
        self, dy: Array, gates: Array, states: Array, extra: Array, ends: Array, **options: Any
    ) -> tuple[Array, Array]:
        n, length, _ = gates.shape
        if self.return_states:
            # Behind the last step, one with f = o = 1 and i = g = c = 0 passes its dh on as dc.
            lengths = options["lengths"]
            at = self.xp.arange(n), length if lengths is None else lengths
            dy, gates, extra = map(self._longer, (dy, gates, extra))
            dy[at], extra[at] = ends[:, 1], 0
            i_f_g_o = self.backend.asarray([0, 1, 0, 1], self.dtype)
            gates.reshape(n, length + 1, 4, self.features)[at] = i_f_g_o[:, None]
            options["lengths"] = None if lengths is None else lengths + 1
        terms = self.backend.empty(gates.shape, self.dtype)
        self.backend.recurrent.lstm_backward(dy, gates, extra, self.u.value, out=terms, **options)
        terms = self.xp.ascontiguousarray(terms[:, :length])
        return terms, terms

    def _longer(self, values: Array) -> Array:
        """Return a copy with a further position."""
        n, length, features = values.shape
        longer = self.backend.zeros((n, length + 1, features), self.dtype)
        longer[:, :length] = values
        return longer


class GRULayer(RecurrentLayer):
    """One direction of a layer of gated recurrent units.

    ``r, z = sigmoid(x w' + b + h' u' + b_u)`` and ``n = tanh(x w' + b + r (h' u' + b_u))``, in the
    rows of `w` and `u` in the order r, z, n; ``h = (1 - z) n + z h'``. The state before the first
    step is zero. The parameters are those of `RecurrentLayer`.

    Raises
    ------
    ValueError
        In `forward`, if a length is not a whole number in 0..T: with the sample and the value.

    References
    ----------
    Cho et al., "Learning phrase representations using RNN encoder-decoder for statistical machine
    translation", EMNLP 2014; with the reset gate behind the product, as in cuDNN and PyTorch.
    """

    gates = 3
    carried = 1
    operations = (11, 18)

    def _forward_steps(
        self, gates: Array, b: Array, states: Array, extra: Array, **options: Any
    ) -> None:
        self.backend.recurrent.gru_forward(
            gates, self.u.value, b, out=states, products=extra, **options
        )

    def _backward_steps(
        self, dy: Array, gates: Array, states: Array, extra: Array, ends: Array, **options: Any
    ) -> tuple[Array, Array]:
        terms = self.backend.empty(gates.shape, self.dtype)
        of_state = self.backend.empty(gates.shape, self.dtype)
        self.backend.recurrent.gru_backward(
            *(dy, gates, states, extra, self.u.value), out=terms, dproducts=of_state, **options
        )
        return terms, of_state


class Recurrent(Block):
    """Base class of stacks of recurrent layers: see `LSTM`."""

    kind: ClassVar[type[RecurrentLayer]]

    def __init__(
        self,
        features: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        return_sequences: bool = True,
        return_states: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        initializer: str | Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.features = check_int(who, "features", features, at_least=1)
        self.layers = check_int(who, "layers", layers, at_least=1)
        self.bidirectional = check_bool(who, "bidirectional", bidirectional)
        self.return_sequences = check_bool(who, "return_sequences", return_sequences)
        self.return_states = check_bool(who, "return_states", return_states)
        self.dropout = check_float(who, "dropout", dropout, at_least=0, below=1)
        self.bias, self.initializer = check_bool(who, "bias", bias), initializer
        self._stack: list[list[RecurrentLayer]] = []

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Connect layers and directions; a second use shares their parameters."""
        each = self.kind.carried
        count = self.layers * (1 + self.bidirectional) * each
        shapes = tuple(node.shape for node in inputs)
        given = states_given(type(self).__name__, shapes, self.features, count)
        self._stack = self._stack or [self._directions(i) for i in range(self.layers)]
        x, lengths = inputs[0], inputs[1 : len(inputs) - given]
        first, last = inputs[len(inputs) - given :], list[Node]()
        for i, directions in enumerate(self._stack):
            if i > 0 and self.dropout > 0:
                x = graph.add(Dropout(self.dropout), x, label=f"dropout{i - 1}")
            outputs = []
            for layer in directions:
                y, ends = graph.add(layer, x, *lengths, *first[:each]), []
                if self.return_states:
                    y, *ends = self._parts(graph, y, f"layer{i}{'_reverse' * layer.reverse}")
                first, last = first[each:], last + ends
                outputs.append(y)
            x = outputs[0]
            if self.bidirectional:
                x = graph.add(Concat(), *outputs, label=f"concat{i}")
        return (x, *last) if self.return_states else x

    def _parts(self, graph: GraphBuilder, node: Node, name: str) -> list[Node]:
        """Return the states of all steps, or the last h, and the states after the last step."""
        ends, steps = [], node.shape[0] - self.kind.carried
        for what, row in zip("hc", range(steps, node.shape[0]), strict=False):
            y = graph.add(Slice(slice(row, row + 1)), node, label=f"{name}_{what}_row")
            ends.append(graph.add(Flatten(), y, label=f"{name}_{what}"))
        if not steps:
            return [ends[0], *ends]
        return [graph.add(Slice(slice(0, steps)), node, label=f"{name}_steps"), *ends]

    def _directions(self, number: int) -> list[RecurrentLayer]:
        """Return the directions of a layer."""
        options: dict[str, Any] = {
            "return_sequences": self.return_sequences or number < self.layers - 1,
            "return_states": self.return_states,
            "bias": self.bias,
            "initializer": self.initializer,
        }
        forward = self.kind(self.features, name=f"layer{number}", **options)
        if not self.bidirectional:
            return [forward]
        name = f"layer{number}_reverse"
        return [forward, self.kind(self.features, reverse=True, name=name, **options)]


class LSTM(Recurrent):
    """Layers of long short-term memory, see `LSTMLayer`.

    Parameters
    ----------
    features : int
        Size H of the state of each layer and direction.
    layers : int
        Number of layers, each of which reads the outputs of the one before.
    bidirectional : bool
        Whether each layer goes through the sequence in both directions; outputs are the states of
        both, next to each other.
    return_sequences : bool
        Whether the output has all steps of the last layer; otherwise only the last step, for the
        backward direction that at the first position.
    return_states : bool
        Whether the states after the last steps are further outputs.
    dropout : float
        Rate of dropped outputs of each layer but the last in training, in [0, 1).
    bias : bool
        Whether there are biases, two for each gate, as in PyTorch.
    initializer : str or Initializer, optional
        Of the matrices; by default uniform between ``-1 / sqrt(H)`` and ``1 / sqrt(H)``, as the
        biases always are.
    name : str, optional

    Notes
    -----
    Input ``(N, T, I)``, output ``(N, T, D H)`` or ``(N, D H)``, where D is 2 with two directions.
    With a second input ``(N, 1)``, the lengths of the samples, only their first positions exist:
    the last step is at the last of them, where the backward direction begins, and outputs of the
    others are 0. The last inputs may be the states before the first step: for each layer, and each
    of its directions, h ``(N, H)`` and c ``(N, H)``, which a GRU does not have. They are zeros by
    default. With `return_states`, further outputs are the states after the last step, in the same
    order. Parameters, with their names in PyTorch: ``layer0.w`` (weight_ih_l0), ``layer0.u``
    (weight_hh_l0), ``layer0.b`` (bias_ih_l0), ``layer0.b_u`` (bias_hh_l0), and
    ``layer0_reverse.w`` (weight_ih_l0_reverse).
    """

    kind = LSTMLayer


class GRU(Recurrent):
    """Layers of gated recurrent units, see `GRULayer`.

    Parameters, shapes and names are those of `LSTM`.
    """

    kind = GRULayer


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])  # (N, T, C) -> (N T, C)


def states_given(who: str, shapes: Sequence[Shape], features: int, count: int) -> int:
    """Return how many of the inputs are states before the first step.

    Raises
    ------
    ValueError
        If inputs are not a sequence, perhaps lengths, and all states or none.
    """
    others = shapes[1:]
    states = others[len(others) in (1, count + 1) and others[0] == (1,) :]
    valid = len(states) in (0, count) and all(shape == (features,) for shape in states)
    if not valid or len(shapes[0]) != 2:
        given = " and ".join(map(str, shapes))
        raise ValueError(
            f"{who}: expected one input of shape (T, features), then lengths of shape (1,) if they "
            f"differ, then either no states or {count}, of shape ({features},), got {given}"
        )
    return len(states)
