"""Scaled dot-product attention, and multi-head attention with its projections."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels.reference.attention import AttentionDropout
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.blocks import Block, GraphBuilder
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.linear import Linear
from pydtnn.layers.masks import both, first_positions, positions_seen
from pydtnn.layers.node import Node
from pydtnn.layers.positions import Positions
from pydtnn.layers.sequence import TakesDocuments, whole_numbers
from pydtnn.utils.validate import check_bool, check_float, check_int


class DotProductAttention(TakesDocuments):
    """``softmax(q k' scale) v`` of each head, where q, k and v are thirds of the input.

    Dropout sets weights, the results of softmax, to zero. The mask is a function of (seed, this
    layer's name, epoch, sample), as that of `Dropout`.

    Parameters
    ----------
    heads : int
    causal : bool
        Whether a position has no weights for the positions after it.
    window : int, optional
        A position has weights for those at smaller distances only.
    positions : LinearBiases or RelativePositions, optional
        What is added to the products of queries and keys.
    scale : float, optional
        Of the products of queries and keys; by default ``1 / sqrt(E)``.
    dropout : float
        Rate of dropped weights in training, in [0, 1).

    Notes
    -----
    Input ``(N, T, 3 D)``: the queries of all heads, then the keys, then the values, each of ``E = D
    / heads`` elements per head. Output ``(N, T, D)``. A second input says which positions exist and
    belong together: the lengths of the samples, ``(N, 1)``, or the document of each position, ``(N,
    T)``, 0 where there is none (one document is a padding mask). Positions have weights for those
    of their document; outputs and gradients of positions that do not exist are 0.

    Raises
    ------
    ValueError
        In `forward`, if a length is not a whole number in 0..T, or a document not one in 0..2^24,
        or its positions are not next to each other: with the sample and the value.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.2. Dao et al.,
    "FlashAttention", NeurIPS 2022, for what is saved: a number per row instead of the weights.
    Beltagy et al., "Longformer: the long-document transformer", 2020 (`window`). Krell et al.,
    "Efficient sequence packing without cross-contamination", 2021 (documents).
    """

    saves: tuple[str, ...] = ("input", "output")
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)

    first_head = 0  # of this rank, if it has a part of the heads

    def can_replay(self) -> bool:
        """Return whether neither a second input nor a bias is computed by the array module."""
        alone = len(self.input_shapes) == 1 and not self.parameters
        return type(self) is DotProductAttention and alone

    def __init__(
        self,
        heads: int,
        *,
        causal: bool = False,
        window: int | None = None,
        positions: Positions | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.heads = self.all_heads = check_int(who, "heads", heads, at_least=1)
        self.causal = check_bool(who, "causal", causal)
        self.looks_ahead = () if self.causal else (self.sequences - 1,)
        self.window = None if window is None else check_int(who, "window", window, at_least=1)
        if not isinstance(positions, Positions | None):
            raise TypeError(
                f"{who}: positions must be LinearBiases, RelativePositions or None, got "
                f"{positions!r}"
            )
        self.positions = positions
        self.scale = None if scale is None else check_float(who, "scale", scale, above=0)
        self.dropout = check_float(who, "dropout", dropout, at_least=0, below=1)

    def build(self, *shapes: Shape) -> Shape:
        """Check that the input has queries, keys and values of all heads."""
        shape = self.sequence(shapes)
        if len(shape) != 2 or shape[1] % (3 * self.heads):
            raise self.fail(
                f"expected queries, keys and values of shape (T, 3 D) with D a multiple of "
                f"heads={self.heads}, got {shape}"
            )
        return self._prepared(shape[0], shape[0], shape[1] // 3)

    def _prepared(self, queries: int, keys: int, features: int) -> Shape:
        """Find which keys are seen in all samples, and declare parameters of positions."""
        self.stream = stream(str(self.name))
        seen = positions_seen(queries, keys, self.causal, self.window)
        self.pairs_seen = int((seen[..., 1] - seen[..., 0]).sum())
        everything = self.pairs_seen == queries * keys
        self.seen = None if everything else self.backend.asarray(seen, np.dtype("int64"))
        self.all_positions = queries, keys
        if self.positions is not None:
            self.positions.declare(self, np.arange(queries), np.arange(keys))
        return queries, features

    def sequence(self, shapes: tuple[Shape, ...]) -> Shape:
        """Return the shape of the first input, after a check of the second."""
        if len(shapes) == 2 and len(shapes[0]) == 2 and shapes[1] == shapes[0][:1]:
            return shapes[0]  # documents
        return super().sequence(shapes)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the output, and the logarithm of each row's sum of exponentials."""
        x, *others = xs
        seen = both(self.xp, self.seen, self._exist(others[0], context)) if others else self.seen
        return self._attend(x, None, seen, context)

    def _attend(
        self, x: Array, kv: Array | None, seen: Array | None, context: StepContext
    ) -> tuple[Array, Saved]:
        length, _ = self.output_shape
        y = self.empty(len(x), self.output_shape)
        log_sums = self.backend.empty((len(x), self.heads, length), self.parameter_dtype)
        options: dict[str, Any] = {
            **{"kv": kv, "seen": seen, "scale": self.scale, "dropout": self._dropped(context)},
            **({} if self.positions is None else self.positions.added(self)),
        }
        self.backend.attention.forward(x, self.heads, out=y, log_sums=log_sums, **options)
        return y, (x, y, log_sums, options)

    def backward(self, dy: Array, saved: Saved) -> Array | tuple[Array, ...]:
        """Compute the weights again, and the gradients of queries, keys and values."""
        dx, _ = self._differentiate(dy, saved, None)
        if len(self.input_shapes) == 1:
            return dx
        return dx, self.backend.zeros((len(dx), *self.input_shapes[1]), self.dtype)

    def _differentiate(
        self, dy: Array, saved: Saved, out_kv: Array | None
    ) -> tuple[Array, Array | None]:
        x, y, log_sums, options = saved
        dx = self.empty(len(x), self.input_shapes[0])
        out_bias = None if self.positions is None else self.positions.gradient(self, options)
        self.backend.attention.backward(
            *(dy, x, y, log_sums, self.heads),
            **{"out": dx, "out_kv": out_kv, "out_bias": out_bias, **options},
        )
        if self.positions is not None:
            self.positions.accumulate(self, out_bias)
        return dx, out_kv

    def example(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        """Draw lengths of keys, or another input."""
        if shape[1:] == (1,):
            return rng.integers(1, self.all_positions[1] + 1, size=shape).astype(np.float32)
        return super().example(shape, rng)

    def _exist(self, given: Array, context: StepContext) -> Array:
        """Return which keys are seen by the lengths or documents of the samples."""
        length = self.all_positions[0]
        if given.shape[1:] == (1,) and length > 1:
            lengths = whole_numbers(self, "lengths", given, length, context.samples)
            return first_positions(self.xp, lengths, length, False)
        return self.documents(given, context)

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
        """Count the pairs of a query and a key of a sample, for which a head has weights.

        Where all positions exist and are of one document.
        """
        return self.pairs_seen

    def cost(self, batch: int) -> Cost:
        """Two products, a scale and a softmax (5) forward; four products, 4 and a scale backward.

        Each product is ``2 E`` operations for a weight of a head. Those that compute the weights
        again in backward do not count. Dropout is a comparison and a product per weight in both
        directions. All samples count with the length T. What is added to scores is a sum per
        weight, in both directions.
        """
        (length, features), (inputs, outputs) = self.output_shape, self.elements(batch)
        seen = self.pairs()
        weights, more = batch * self.heads * seen, 2 * (self.dropout > 0)
        more += self.positions is not None
        products = 2 * batch * seen * features
        sums = batch * self.heads * length * self.parameter_dtype.itemsize
        return Cost(
            2 * products + (6 + more) * weights,
            4 * products + (5 + more) * weights,
            (inputs + outputs) * self.dtype.itemsize + sums,
            2 * (inputs + outputs) * self.dtype.itemsize + sums,
        )


class CrossAttention(DotProductAttention):
    """``softmax(q k' scale) v`` of queries of a sequence, and keys and values of another.

    Parameters are those of `DotProductAttention`.

    Notes
    -----
    Inputs ``(N, T1, D)``, the queries of all heads, and ``(N, T2, 2 D)``, the keys and then the
    values. Output ``(N, T1, D)``. A third input ``(N, 1)`` is the lengths of the second sequences:
    positions behind them have no weights.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.2.3.
    """

    supports = ()
    sequences = 2

    def build(self, *shapes: Shape) -> Shape:
        """Check that there are queries, and keys and values of as many features."""
        expected = "expected queries (T1, D), keys and values (T2, 2 D), and lengths (1,) or none"
        given = " and ".join(map(str, shapes))
        if len(shapes) not in (2, 3) or any(len(s) != 2 for s in shapes[:2]):
            raise self.fail(f"{expected}, got {given}")
        (queries, features), (keys, more) = shapes[:2]
        if more != 2 * features or features % self.heads or shapes[2:] not in ((), ((1,),)):
            raise self.fail(f"{expected}, with D a multiple of heads={self.heads}, got {given}")
        return self._prepared(queries, keys, features)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the output, and the logarithm of each row's sum of exponentials."""
        q, kv, *others = xs
        seen = both(self.xp, self.seen, self._exist(others[0], context)) if others else self.seen
        return self._attend(q, kv, seen, context)

    def _exist(self, given: Array, context: StepContext) -> Array:
        """Return which keys are seen by the lengths of the second sequences."""
        queries, keys = self.all_positions
        lengths = whole_numbers(self, "lengths", given, keys, context.samples)
        return first_positions(self.xp, lengths, queries, True)

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, ...]:
        """Compute the gradients of queries, and of keys and values."""
        dq, dkv = self._differentiate(dy, saved, self.empty(len(dy), self.input_shapes[1]))
        assert dkv is not None
        shapes = self.input_shapes[2:]
        return dq, dkv, *(self.backend.zeros((len(dq), *s), self.dtype) for s in shapes)


class MultiHeadAttention(Block):
    """A projection to queries, keys and values, attention, an output projection.

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
    **attention
        Further options of `DotProductAttention`: window, positions, scale.

    Raises
    ------
    ValueError
        If the input is not of shape (T, D), or the second not as `DotProductAttention` takes it, or
        `heads` does not divide D.

    Notes
    -----
    Input and output ``(N, T, D)``. A second input is that of `DotProductAttention`: lengths ``(N,
    1)`` or documents ``(N, T)``. Parameters, with their names in `torch.nn.MultiheadAttention`:
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
        **attention: Any,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.initializer, self.output_initializer = initializer, output_initializer
        self.heads = check_int(who, "heads", heads, at_least=1)
        self.causal = check_bool(who, "causal", causal)
        self.dropout = check_float(who, "dropout", dropout, at_least=0, below=1)
        self.bias, self.attention = check_bool(who, "bias", bias), attention
        self._parts: tuple[Layer, ...] = ()

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the projections and the attention; a second use shares their parameters."""
        if not 1 <= len(inputs) <= 2 or len(inputs[0].shape) != 2:
            raise self._wrong(inputs, "one input of shape (T, D), and lengths or documents if any")
        x, *mask = inputs
        self._check_heads(x)
        features = x.shape[-1]
        self._parts = self._parts or (
            self._projection(3 * features, "in_proj"),
            self._attention(DotProductAttention),
            self._projection(features, "out_proj"),
        )
        first, attention, last = self._parts
        return graph.add(last, graph.add(attention, graph.add(first, x), *mask))

    def _wrong(self, inputs: tuple[Node, ...], expected: str) -> ValueError:
        shapes = " and ".join(str(node.shape) for node in inputs)
        return ValueError(f"{type(self).__name__}: expected {expected}, got {shapes}")

    def _check_heads(self, x: Node) -> None:
        if x.shape[-1] % self.heads:
            raise ValueError(
                f"{type(self).__name__}: heads must divide the {x.shape[-1]} features of the input "
                f"{x.shape}, got {self.heads}"
            )

    def _attention(self, kind: type[DotProductAttention]) -> DotProductAttention:
        options = {"causal": self.causal, "dropout": self.dropout, **self.attention}
        return kind(self.heads, name="attention", **options)

    def _projection(self, features: int, name: str) -> Linear:
        last = name == "out_proj"
        initializer = self.output_initializer if last else self.initializer
        return Linear(features, bias=self.bias, initializer=initializer, name=name)


class MultiHeadCrossAttention(MultiHeadAttention):
    """Attention of a sequence to another: projections, `CrossAttention`, an output projection.

    Parameters are those of `MultiHeadAttention`.

    Notes
    -----
    Inputs ``(N, T1, D)``, which queries are computed from, and ``(N, T2, D2)``, which keys and
    values are; a third one ``(N, 1)`` is the lengths of the second sequences. Output ``(N, T1,
    D)``. Parameters ``q_proj.w (D, D)``, ``kv_proj.w (2 D, D2)``, ``out_proj.w (D, D)``, and their
    biases: the first two are parts of in_proj_weight of `torch.nn.MultiheadAttention`.
    """

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the projections and the attention; a second use shares their parameters."""
        if not 2 <= len(inputs) <= 3 or any(len(node.shape) != 2 for node in inputs[:2]):
            expected = "queries (T1, D), a sequence (T2, D2), and its lengths (1,) if they differ"
            raise self._wrong(inputs, expected)
        x, memory, *lengths = inputs
        self._check_heads(x)
        features = x.shape[-1]
        self._parts = self._parts or (
            self._projection(features, "q_proj"),
            self._projection(2 * features, "kv_proj"),
            self._attention(CrossAttention),
            self._projection(features, "out_proj"),
        )
        queries, keys, attention, last = self._parts
        projected = graph.add(queries, x), graph.add(keys, memory)
        return graph.add(last, graph.add(attention, *projected, *lengths))
