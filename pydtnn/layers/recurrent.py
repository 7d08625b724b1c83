"""Recurrent layers: one direction of one layer, and stacks of layers in one or two directions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Saved, Shape, StepContext
from pydtnn.layers.blocks import Block, GraphBuilder
from pydtnn.layers.cost import Cost
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.initializers import Initializer, Uniform
from pydtnn.layers.merge import Concat
from pydtnn.layers.node import Node
from pydtnn.layers.recomputed import Recomputed, kept, restored
from pydtnn.layers.sequence import TakesLengths, sequence_inputs
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
    bias : bool
    initializer : str or Initializer, optional
        Of both matrices; by default uniform between ``-1 / sqrt(H)`` and ``1 / sqrt(H)``, as the
        biases always are.

    Notes
    -----
    Input ``(N, T, I)``, output ``(N, T, H)`` or ``(N, H)``; parameters ``w (G H, I)``, ``u (G H,
    H)``, ``b (G H,)`` and ``b_u (G H,)``, for G gates. With a second input ``(N, 1)``, the lengths
    of the samples, only their first positions exist: the last step is at the last of them, and
    outputs and gradients of the others are 0. Models of 16 bits compute these layers in float32.
    """

    gates: ClassVar[int]
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
        bias: bool = True,
        initializer: str | Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.features = check_int(who, "features", features, at_least=1)
        self.reverse = check_bool(who, "reverse", reverse)
        self.return_sequences = check_bool(who, "return_sequences", return_sequences)
        self.bias = check_bool(who, "bias", bias)
        self.initializer = initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (G H, I), u (G H, H), b and b_u (G H,)."""
        shape = self.sequence(shapes)
        if len(shape) != 2:
            raise self.fail(f"expected an input of shape (T, features), got {shape}")
        length, inputs = shape
        rows, usual = self.gates * self.features, Uniform(self.features**-0.5)
        matrices = usual if self.initializer is None else self.initializer
        self.w = self.parameter("w", (rows, inputs), matrices)
        self.u = self.parameter("u", (rows, self.features), matrices)
        self.biases = [
            self.parameter(name, (rows,), usual, decay=False) for name in ("b", "b_u") if self.bias
        ]
        return (length, self.features) if self.return_sequences else (self.features,)

    def forward(self, *xs: Array | Recomputed, context: StepContext) -> tuple[Array, Saved]:
        """Compute the terms ``x w' + b`` of all steps, then the steps."""
        x, *others = xs
        lengths = self.lengths(others[0], context) if others else None
        n, length = x.shape[0], self.input_shapes[0][0]
        gates = self.empty(n, (length, self.w.shape[0]))
        states = self.empty(n, (length, self.features))
        extra = self.empty(n, (length, self.features))
        b, b_u = (p.value for p in self.biases) if self.bias else (None, self._no_bias())
        self.backend.linear.forward(_rows(self.array(x)), self.w.value, b, out=_rows(gates))
        self._forward_steps(gates, b_u, states, extra, lengths)
        y = states
        if not self.return_sequences:
            y = self.xp.ascontiguousarray(states[self._last(lengths, n)])
        return y, (kept(x), gates, states, extra, lengths)

    def backward(self, dy: Array, saved: Saved) -> Array | tuple[Array, ...] | None:
        """Compute the gradients of all terms step by step, then those of x, w, u and the biases."""
        linear, (x, gates, states, extra, lengths) = self.backend.linear, saved
        if not self.return_sequences:
            last, dy = dy, self.backend.zeros(states.shape, self.dtype)
            dy[self._last(lengths, len(dy))] = last
        of_input, of_state = self._backward_steps(dy, gates, states, extra, lengths)
        if not self.u.frozen:
            before = _rows(self._states_before(states))
            u = self.u
            linear.backward_filter(before, _rows(of_state), out=u.grad, accumulate=u.accumulate)
            del before
        if not self.w.frozen:
            inputs, w = _rows(restored(x)), self.w
            linear.backward_filter(inputs, _rows(of_input), out=w.grad, accumulate=w.accumulate)
            del inputs
        self._backward_biases(of_input, of_state)
        dx = None
        if self.needs_dx:
            dx = self.empty(len(dy), self.input_shapes[0])
            linear.backward_data(_rows(of_input), self.w.value, out=_rows(dx))
        if len(self.input_shapes) == 1:
            return dx
        return dx, self.backend.zeros((len(dy), 1), self.dtype)

    @abstractmethod
    def _forward_steps(
        self, gates: Array, b: Array, states: Array, extra: Array, lengths: Array | None
    ) -> None:
        """Replace the terms in `gates` by the gates, and compute the states."""

    @abstractmethod
    def _backward_steps(
        self, dy: Array, gates: Array, states: Array, extra: Array, lengths: Array | None
    ) -> tuple[Array, Array]:
        """Return the gradients of the terms of the input, and of the state."""

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
        if self.reverse:
            return slice(None), 0
        if lengths is None:
            return slice(None), -1
        return self.xp.arange(n), self.xp.maximum(lengths - 1, 0)

    def _states_before(self, states: Array) -> Array:
        """Return the states that the steps have read."""
        before = self.backend.empty(states.shape, self.dtype)
        first = -1 if self.reverse else 0
        source, target = (slice(1, None), slice(None, -1))[:: 1 if self.reverse else -1]
        before[:, target], before[:, first] = states[:, source], 0
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
        products = dw * (x + rows + w) + du * (3 * units + rows + u) + dx * (rows + w + x)
        return Cost(
            of_w + of_u + forward * units,
            of_w * (dw + dx) + of_u * (1 + du) + backward * units + rows * sums,
            read * itemsize,
            (steps_back + products + sums * rows) * itemsize,
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
    operations = (13, 24)

    def _forward_steps(
        self, gates: Array, b: Array, states: Array, extra: Array, lengths: Array | None
    ) -> None:
        self.backend.recurrent.lstm_forward(
            *(gates, self.u.value, b),
            out=states,
            cells=extra,
            reverse=self.reverse,
            lengths=lengths,
        )

    def _backward_steps(
        self, dy: Array, gates: Array, states: Array, extra: Array, lengths: Array | None
    ) -> tuple[Array, Array]:
        terms = self.backend.empty(gates.shape, self.dtype)
        self.backend.recurrent.lstm_backward(
            *(dy, gates, extra, self.u.value), out=terms, reverse=self.reverse, lengths=lengths
        )
        return terms, terms


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
    operations = (11, 18)

    def _forward_steps(
        self, gates: Array, b: Array, states: Array, extra: Array, lengths: Array | None
    ) -> None:
        self.backend.recurrent.gru_forward(
            *(gates, self.u.value, b),
            out=states,
            products=extra,
            reverse=self.reverse,
            lengths=lengths,
        )

    def _backward_steps(
        self, dy: Array, gates: Array, states: Array, extra: Array, lengths: Array | None
    ) -> tuple[Array, Array]:
        terms = self.backend.empty(gates.shape, self.dtype)
        of_state = self.backend.empty(gates.shape, self.dtype)
        self.backend.recurrent.gru_backward(
            *(dy, gates, states, extra, self.u.value),
            out=terms,
            dproducts=of_state,
            reverse=self.reverse,
            lengths=lengths,
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
        self.dropout = check_float(who, "dropout", dropout, at_least=0, below=1)
        self.bias, self.initializer = check_bool(who, "bias", bias), initializer
        self._stack: list[list[RecurrentLayer]] = []

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect layers and directions; a second use shares their parameters."""
        sequence_inputs(type(self).__name__, inputs, "(T, features)")
        self._stack = self._stack or [self._directions(i) for i in range(self.layers)]
        x, *lengths = inputs
        for i, directions in enumerate(self._stack):
            if i > 0 and self.dropout > 0:
                x = graph.add(Dropout(self.dropout, name=f"dropout{i - 1}"), x)
            outputs = [graph.add(layer, x, *lengths) for layer in directions]
            x = graph.add(Concat(name=f"concat{i}"), *outputs) if len(outputs) > 1 else outputs[0]
        return x

    def _directions(self, number: int) -> list[RecurrentLayer]:
        """Return the directions of a layer."""
        options: dict[str, Any] = {
            "return_sequences": self.return_sequences or number < self.layers - 1,
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
    the last step is at the last of them, and outputs of the others are 0. Parameters, with their
    names in PyTorch: ``layer0.w`` (weight_ih_l0), ``layer0.u`` (weight_hh_l0), ``layer0.b``
    (bias_ih_l0), ``layer0.b_u`` (bias_hh_l0), and ``layer0_reverse.w`` (weight_ih_l0_reverse).
    """

    kind = LSTMLayer


class GRU(Recurrent):
    """Layers of gated recurrent units, see `GRULayer`.

    Parameters, shapes and names are those of `LSTM`.
    """

    kind = GRULayer


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])  # (N, T, C) -> (N T, C)
