"""Scaled dot-product attention, and multi-head attention with its projections."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.reference.attention import AttentionDropout
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.blocks import Block, GraphBuilder
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.linear import Linear
from pydtnn.layers.node import Node
from pydtnn.layers.sequence import TakesLengths, sequence_inputs
from pydtnn.utils.validate import check_bool, check_float, check_int


class DotProductAttention(TakesLengths):
    """``softmax(q k' / sqrt(E)) v`` of each head, where q, k and v are thirds of the input.

    Dropout sets weights, the results of softmax, to zero. The mask is a function of (seed, this
    layer's name, epoch, sample), as that of `Dropout`.

    Parameters
    ----------
    heads : int
    causal : bool
        Whether a position has no weights for the positions after it.
    dropout : float
        Rate of dropped weights in training, in [0, 1).

    Notes
    -----
    Input ``(N, T, 3 D)``: the queries of all heads, then the keys, then the values, each of ``E = D
    / heads`` elements per head. Output ``(N, T, D)``. With a second input ``(N, 1)``, the lengths
    of the samples, only their first positions exist: outputs and gradients of the others are 0.

    Raises
    ------
    ValueError
        In `forward`, if a length is not a whole number in 0..T: with the sample and the value.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.2. Dao et al.,
    "FlashAttention", NeurIPS 2022, for what is saved: a number per row instead of the weights.
    """

    saves: tuple[str, ...] = ("input", "output")
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)

    first_head = 0  # of this rank, if it has a part of the heads

    def can_replay(self) -> bool:
        """Return whether there are no lengths, which the array module checks."""
        return type(self) is DotProductAttention and len(self.input_shapes) == 1

    def __init__(
        self,
        heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.heads = check_int(who, "heads", heads, at_least=1)
        self.causal = check_bool(who, "causal", causal)
        self.dropout = check_float(who, "dropout", dropout, at_least=0, below=1)

    def build(self, *shapes: Shape) -> Shape:
        """Check that the input has queries, keys and values of all heads."""
        shape = self.sequence(shapes)
        if len(shape) != 2 or shape[1] % (3 * self.heads):
            raise self.fail(
                f"expected queries, keys and values of shape (T, 3 D) with D a multiple of "
                f"heads={self.heads}, got {shape}"
            )
        self.stream = stream(str(self.name))
        return shape[0], shape[1] // 3

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the output, and the logarithm of each row's sum of exponentials."""
        x, *others = xs
        length, _ = self.output_shape
        lengths = self.lengths(others[0], context) if others else None
        y = self.empty(len(x), self.output_shape)
        log_sums = self.backend.empty((len(x), self.heads, length), self.parameter_dtype)
        options: dict[str, Any] = {
            "causal": self.causal,
            "lengths": lengths,
            "dropout": self._dropped(context),
        }
        self.backend.attention.forward(x, self.heads, out=y, log_sums=log_sums, **options)
        return y, (x, y, log_sums, options)

    def backward(self, dy: Array, saved: Saved) -> Array | tuple[Array, ...]:
        """Compute the weights again, and the gradients of queries, keys and values."""
        x, y, log_sums, options = saved
        dx = self.empty(len(x), self.input_shapes[0])
        self.backend.attention.backward(dy, x, y, log_sums, self.heads, out=dx, **options)
        if len(self.input_shapes) == 1:
            return dx
        return dx, self.backend.zeros((len(x), 1), self.dtype)

    def _dropped(self, context: StepContext) -> AttentionDropout | None:
        """Return the key of the mask in training."""
        if not context.training or self.dropout == 0:
            return None
        if context.samples is None:
            raise self.fail("training requires the ids of the samples; set StepContext.samples")
        samples = self.backend.to_numpy(context.samples)
        key = context.seed, self.stream, int(context.epoch), samples
        return AttentionDropout(self.dropout, *key, self.first_head)

    def pairs(self) -> int:
        """Count the pairs of a query and a key of a sample, for which a head has weights."""
        length = self.output_shape[0]
        return length * (length + 1) // 2 if self.causal else length * length

    def cost(self, batch: int) -> Cost:
        """Two products, a scale and a softmax (5) forward; four products, 4 and a scale backward.

        Each product is ``2 E`` operations for a weight of a head. Those that compute the weights
        again in backward do not count. Dropout is a comparison and a product per weight in both
        directions. All samples count with the length T.
        """
        (length, features), (_, outputs) = self.output_shape, self.elements(batch)
        inputs = 3 * outputs
        seen = self.pairs()
        weights, dropped = batch * self.heads * seen, 2 * (self.dropout > 0)
        products = 2 * batch * seen * features
        sums = batch * self.heads * length * self.parameter_dtype.itemsize
        return Cost(
            2 * products + (6 + dropped) * weights,
            4 * products + (5 + dropped) * weights,
            (inputs + outputs) * self.dtype.itemsize + sums,
            2 * (inputs + outputs) * self.dtype.itemsize + sums,
        )


class MultiHeadAttention(Block):
    """Self-attention: a projection to queries, keys and values, attention, an output projection.

    With a second input ``(N, 1)``, the lengths of the samples, positions beyond a length are not
    seen by others, and their own attention is 0.

    Parameters
    ----------
    heads : int
        Must divide the features.
    causal : bool
        Whether a position does not depend on the positions after it.
    dropout : float
        Rate of dropped attention weights in training, in [0, 1).
    bias : bool
        Whether the projections have biases.
    initializer, output_initializer : str or Initializer
        Of the matrices of the projections.
    name : str, optional

    Raises
    ------
    ValueError
        If the input is not of shape (T, D), or the second not (1,), or `heads` does not divide D.

    Notes
    -----
    Input and output ``(N, T, D)``. Parameters, with their names in `torch.nn.MultiheadAttention`:
    ``in_proj.w (3 D, D)`` (in_proj_weight), ``in_proj.b (3 D,)`` (in_proj_bias), ``out_proj.w (D,
    D)`` (out_proj.weight), ``out_proj.b (D,)`` (out_proj.bias).

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.2.2.
    """

    def __init__(
        self,
        heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        initializer: str | Initializer = "glorot_uniform",
        output_initializer: str | Initializer = "glorot_uniform",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.initializer, self.output_initializer = initializer, output_initializer
        self.heads = check_int(who, "heads", heads, at_least=1)
        self.causal = check_bool(who, "causal", causal)
        self.dropout = check_float(who, "dropout", dropout, at_least=0, below=1)
        self.bias = check_bool(who, "bias", bias)
        self._parts: tuple[Layer, ...] = ()

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the projections and the attention; a second use shares their parameters."""
        sequence_inputs("MultiHeadAttention", inputs, "(T, D)")
        x, *lengths = inputs
        features = x.shape[-1]
        if features % self.heads:
            raise ValueError(
                f"MultiHeadAttention: heads must divide the {features} features of the input "
                f"{x.shape}, got {self.heads}"
            )
        self._parts = self._parts or (
            Linear(3 * features, bias=self.bias, initializer=self.initializer, name="in_proj"),
            DotProductAttention(
                self.heads, causal=self.causal, dropout=self.dropout, name="attention"
            ),
            Linear(features, bias=self.bias, initializer=self.output_initializer, name="out_proj"),
        )
        first, attention, last = self._parts
        return graph.add(last, graph.add(attention, graph.add(first, x), *lengths))
