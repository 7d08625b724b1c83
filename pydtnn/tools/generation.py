"""Texts that a network continues: each token is drawn from its logits after those before it."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np

from pydtnn.kernels.reference.attention import At
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import stream, uniform
from pydtnn.layers.activation import Activation
from pydtnn.layers.attention import DotProductAttention
from pydtnn.layers.base import Layer, Shape, StepContext, computes_like
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.embedding import Embedding
from pydtnn.layers.experts import Experts
from pydtnn.layers.linear import Linear
from pydtnn.layers.merge import Add, Multiply
from pydtnn.layers.node import Node
from pydtnn.layers.norm import LayerNorm, RMSNorm
from pydtnn.layers.rotary import Rotary
from pydtnn.layers.sequence import PositionalEmbedding
from pydtnn.model.model import Model
from pydtnn.utils.validate import check_float, check_int, plain_array

WHO = "generate"

EACH = (Activation, Add, Dropout, Embedding, Experts, LayerNorm, Linear, Multiply, RMSNorm)
"""Layers that compute each position by itself."""

PLACED = (DotProductAttention, PositionalEmbedding, Rotary)
"""Layers that `Cached` computes at one position, from what it keeps of those before."""

INFERENCE = StepContext(training=False, differentiable=False)


def generate(
    model: Model,
    tokens: Any,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continue texts by `count` tokens, each drawn from the logits after those before it.

    Collective on a mesh: all ranks call it, and get the same tokens. The keys and values of
    attention are kept, so that a token costs a pass over one position, while a text is shorter than
    the sequences of the model and this consists of layers of `gpt` and `llama`, on one rank;
    otherwise, a token costs a pass over the last positions of the text.

    Parameters
    ----------
    model : Model
        Of tokens ``(N, T)`` to logits ``(N, T, K)``, which depend on no later token.
    tokens : array of int, shape (n,) or (N, n)
        Beginning of a text, or of several of equal length, with at least one token.
    count : int
    temperature : float
        Divides the logits; 0 takes the most likely token.
    top_k : int, optional
        Draw from the `top_k` most likely tokens (Fan, Lewis and Dauphin, ACL 2018).
    top_p : float, optional
        Draw from the fewest of these most likely tokens whose probabilities sum to at least `top_p`
        (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020, section 3.1).
    seed : int
        Random numbers are a function of seed, row and place of the token.

    Returns
    -------
    ndarray of int64, shape (n + count,) or (N, n + count)
        The texts, with their beginnings.

    Raises
    ------
    TypeError, ValueError
        If `model` is not such a network, tokens are not among its tokens, or an option is out of
        range.
    """
    length, classes = _sizes(model)
    text = _beginning(tokens, classes)
    check_int(WHO, "count", count, at_least=0)
    check_float(WHO, "temperature", temperature, at_least=0)
    if top_k is not None:
        check_int(WHO, "top_k", top_k, at_least=1)
    if top_p is not None:
        check_float(WHO, "top_p", top_p, above=0, at_most=1)
    check_int(WHO, "seed", seed, at_least=0)
    cache: Cached | None = None
    for place in range(text.shape[1], text.shape[1] + count):
        if place > length or not Cached.fits(model):
            window = text[:, -length:]
            logits = model.predict(_padded(window, length))[:, window.shape[1] - 1]
        elif cache is None:
            cache = Cached(model, text)
            logits = cache.logits
        else:
            logits = cache.add(text[:, -1])
        numbers = uniform(seed, stream(WHO), place, np.arange(len(text)), 1)[:, 0]
        drawn = draw(logits, numbers, temperature=temperature, top_k=top_k, top_p=top_p)
        text = np.concatenate([text, drawn[:, None]], axis=1)
    return text if np.ndim(tokens) == 2 else text[0]


def draw(
    logits: np.ndarray,
    numbers: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> np.ndarray:
    """Draw a token from each row of logits (N, K) by a uniform number in [0, 1); see `generate`.

    Of equal logits, the first token is the most likely one.
    """
    logits = logits.astype("float64")
    order = np.argsort(-logits, axis=1, kind="stable")
    if temperature == 0:
        return order[:, 0]
    scores = np.take_along_axis(logits, order, axis=1)[:, :top_k]
    weights = np.exp((scores - scores[:, :1]) / temperature)
    weights /= weights.sum(axis=1, keepdims=True)
    if top_p is not None:
        weights[:, 1:][np.cumsum(weights, axis=1)[:, :-1] >= top_p] = 0
    sums = np.cumsum(weights, axis=1)
    places = (sums <= numbers[:, None] * sums[:, -1:]).sum(axis=1)
    return np.take_along_axis(order, places[:, None], axis=1)[:, 0]


class Cached:
    """The logits after texts that grow, with the keys and values of all positions kept.

    Parameters
    ----------
    model : Model
        For which `fits` is true.
    text : ndarray of int64, shape (N, n)
        Beginnings of at most as many tokens as sequences of the model have.

    Attributes
    ----------
    logits : ndarray, shape (N, K)
        After the last token.

    Notes
    -----
    The cache of an attention has ``2 N T D`` elements, also if groups of heads share keys.
    """

    def __init__(self, model: Model, text: np.ndarray) -> None:
        self.model, self.count = model, text.shape[1]
        self.cache: dict[Node, Array] = {}
        self.added: dict[Node, dict[str, Any]] = {}  # to scores, by positions
        readers = {
            node.inputs[0]: node
            for node in model.graph.nodes
            if isinstance(node.layer, DotProductAttention)
        }

        def keep(node: Node, y: Array) -> None:
            if node in readers:
                self.cache[readers[node]] = y[..., y.shape[-1] // 3 :].copy()  # (N, T, 2 D)

        x = model.backend.asarray(_padded(text, model.input_shapes[0][0]), model.dtype)
        for node in readers.values():
            layer = cast(DotProductAttention, node.layer)
            self.added[node] = {} if layer.positions is None else layer.positions.added(layer)
        y, _ = model.forward(x, INFERENCE, keep=False, after_node=keep)
        self.logits = model.backend.to_numpy(y[:, self.count - 1])

    @staticmethod
    def fits(model: Model) -> bool:
        """Return whether a model is on one rank and consists of layers that are known here."""
        layers = [node.layer for node in model.graph.nodes[len(model.graph.inputs) :]]
        return model.mesh is None and all(
            any(isinstance(x, kind) and computes_like(x, kind) for kind in (*EACH, *PLACED))
            and getattr(x, "axes", 1) == 1
            and not (isinstance(x, DotProductAttention) and len(x.input_shapes) > 1)
            for x in layers
        )

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (N, K) after one more token of each text."""
        graph, place = self.model.graph, self.count
        values: dict[Node, Array] = {
            graph.inputs[0]: self.model.backend.asarray(tokens[:, None], self.model.dtype)
        }
        for node in graph.nodes[len(graph.inputs) :]:
            xs = [values[source] for source in node.inputs]
            if isinstance(node.layer, DotProductAttention):
                values[node] = self._attend(node, *xs)
            elif isinstance(node.layer, PositionalEmbedding):
                values[node] = xs[0] + node.layer.w.value[place]
            else:
                values[node] = single_position(node.layer, place).forward(*xs, context=INFERENCE)[0]
        self.count += 1
        self.logits = self.model.backend.to_numpy(values[graph.outputs[0]][:, 0])
        return self.logits

    def _attend(self, node: Node, qkv: Array) -> Array:
        """Compute attention of the newest position, qkv (N, 1, 3 D), to all that are kept."""
        layer, place = cast(DotProductAttention, node.layer), slice(self.count, self.count + 1)
        backend, cache, added = self.model.backend, self.cache[node], {**self.added[node]}
        features = qkv.shape[-1] // 3
        cache[:, place] = qkv[..., features:]
        if "bias" in added:
            added["bias"] = backend.xp.ascontiguousarray(added["bias"][:, place])
        y = backend.empty((len(qkv), 1, features), qkv.dtype)
        log_sums = backend.empty((len(qkv), layer.heads, 1), layer.parameter_dtype)
        backend.attention.forward(
            *(qkv[..., :features], layer.heads),
            **{"out": y, "log_sums": log_sums, "kv": cache, "scale": layer.scale, **added},
            at=At(self.count, 0, cache.shape[1]),
            seen=None if layer.seen is None else layer.seen[:, place],
        )
        return y


def single_position(layer: Layer, place: int) -> Layer:
    """Return a copy of a layer for sequences of one position, with the same parameters."""
    one: Any = copy.copy(layer)
    one.input_shapes = tuple((1, *shape[1:]) for shape in layer.input_shapes)
    one.output_shape = (1, *layer.output_shape[1:])
    one.overwrites_input = False
    if isinstance(layer, Rotary):
        one.cos, one.sin = layer.cos[place : place + 1], layer.sin[place : place + 1]
    return one


def _sizes(model: Model) -> tuple[int, int]:
    """Return the length of sequences and the number of tokens of a model."""
    inputs, outputs = model.input_shapes, model.output_shapes
    shapes: tuple[Shape, ...] = (*inputs, *outputs)
    if len(shapes) != 2 or len(shapes[0]) != 1 or shapes[1][:-1] != shapes[0]:
        raise ValueError(
            f"{WHO}: expected a model of tokens (T,) to logits (T, K), got one of "
            f"{' and '.join(map(str, inputs))} to {' and '.join(map(str, outputs))}"
        )
    for node in model.graph.nodes:
        if isinstance(node.layer, DotProductAttention) and not node.layer.causal:
            raise ValueError(
                f"{WHO}: expected logits that depend on no later token, but {node.name} is not "
                "causal; use causal=True"
            )
    return shapes[0][0], shapes[1][-1]


def _beginning(tokens: Any, classes: int) -> np.ndarray:
    """Return the beginnings (N, n) of texts as int64."""
    text = np.atleast_2d(plain_array(WHO, "tokens", tokens))
    whole = text.dtype.kind in "iu"
    if text.ndim != 2 or not text.shape[1] or not whole or text.min() < 0 or text.max() >= classes:
        given = f"{text.dtype} of shape {np.shape(tokens)}"
        if whole and text.size:
            given += f" in {text.min()}..{text.max()}"
        raise ValueError(
            f"{WHO}: tokens must be integers in 0..{classes - 1} of shape (n,) or (N, n), at least "
            f"one of each text, got {given}"
        )
    return text.astype("int64")


def _padded(text: np.ndarray, length: int) -> np.ndarray:
    """Return texts (N, T) as floats, with zeros behind them, on which nothing before depends."""
    padded = np.zeros((len(text), length))
    padded[:, : text.shape[1]] = text
    return padded
