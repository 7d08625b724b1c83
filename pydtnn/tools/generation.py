"""Texts that a network continues, with tokens that are drawn, or the most likely ones together."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np

from pydtnn.data.batch import parts
from pydtnn.kernels.reference.attention import At
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import stream, uniform
from pydtnn.layers.activation import Activation
from pydtnn.layers.attention import DotProductAttention
from pydtnn.layers.base import Layer, StepContext, computes_like
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

WHO, BEAM = "generate", "beam_search"

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
    length, classes = _sizes(WHO, model)
    text = _beginning(WHO, tokens, classes)
    check_int(WHO, "count", count, at_least=0)
    check_float(WHO, "temperature", temperature, at_least=0)
    if top_k is not None:
        check_int(WHO, "top_k", top_k, at_least=1)
    if top_p is not None:
        check_float(WHO, "top_p", top_p, above=0, at_most=1)
    check_int(WHO, "seed", seed, at_least=0)
    predictor = _Predictor(model, length)
    for place in range(text.shape[1], text.shape[1] + count):
        logits = predictor.after(text)
        numbers = uniform(seed, stream(WHO), place, np.arange(len(text)), 1)[:, 0]
        drawn = draw(logits, numbers, temperature=temperature, top_k=top_k, top_p=top_p)
        text = np.concatenate([text, drawn[:, None]], axis=1)
    return text if np.ndim(tokens) == 2 else text[0]


def beam_search(
    model: Model,
    text: Any,
    count: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    end: int | None = None,
    source: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Continue texts by `count` tokens that are together as likely as possible.

    After each token, the `beams` most likely hypotheses of a text are kept. One with the token
    `end` is complete: it keeps its place, and the others are compared for the places that are left.
    Of equal hypotheses, the one with the better beginning is first, then that with the smaller
    token. Collective on a mesh, as `generate`, and of the same cost for each hypothesis.

    Parameters
    ----------
    model : Model
        Of tokens ``(N, T)`` to logits ``(N, T, K)``, which depend on no later token; or of a
        source, these tokens, and perhaps the source's lengths, such as `transformer` and `t5`.
    text : array of int, shape (n,) or (N, n)
        Beginning of a text, or of several of equal length, with at least one token, such as the one
        with which targets begin.
    count : int
    beams : int
        Hypotheses of a text; 1 takes the most likely token after each other.
    length_penalty : float
        The exponent a, from 0 on; larger ones favour long texts.
    end : int, optional
        The token that ends a text; without it, all have `count` tokens.
    source : array or tuple of arrays, optional
        The first input of the model, or all but the second one: ``(N, T1)``, lengths ``(N, 1)``.

    Returns
    -------
    tokens : ndarray of int64, shape (N, B, n + count)
        The hypotheses of each text, the best one first, with their beginnings; tokens behind `end`
        are `end`. B is `beams`, or the number of texts of `count` tokens if that is smaller.
    scores : ndarray of float64, shape (N, B)
        Sum of the log-probabilities of m tokens, with `end`, divided by ``((5 + m) / 6)^a``; -inf
        where there are fewer hypotheses, whose tokens mean nothing.
        For one text ``(n,)``, both are without N.

    Raises
    ------
    TypeError, ValueError
        If `model` is not such a network, tokens are not among its tokens, or an option is out of
        range.

    References
    ----------
    Wu et al., "Google's neural machine translation system", 2016, section 7, equation 14. Sutskever
    et al., "Sequence to sequence learning with neural networks", NeurIPS 2014, section 3.2.
    """
    others = () if source is None else tuple(plain_array(BEAM, "source", x) for x in parts(source))
    length, classes = _sizes(BEAM, model, source=bool(others))
    texts = _beginning(BEAM, text, classes)
    begin = texts.shape[1]
    check_int(BEAM, "count", count, at_least=0, at_most=length + 1 - begin if others else count)
    check_int(BEAM, "beams", beams, at_least=1)
    check_float(BEAM, "length_penalty", length_penalty, at_least=0)
    end = -1 if end is None else check_int(BEAM, "end", end, at_least=0, at_most=classes - 1)
    predictor, samples = _Predictor(model, length, others), np.arange(len(texts))[:, None]
    sums, rows = np.zeros((len(texts), 1)), cast(Any, ...)
    for _ in range(count):
        ended = (texts[:, begin:] == end).any(axis=1).reshape(sums.shape)
        if ended.all():
            break
        logits = predictor.after(texts, rows).astype("float64").reshape(*sums.shape, classes)
        logits -= np.logaddexp.reduce(logits, axis=2, keepdims=True)
        logits[ended] = np.where(np.arange(classes) == end, 0, -np.inf)
        after = (sums[:, :, None] + logits).reshape(len(sums), -1)
        complete = np.repeat(ended, classes, axis=1) & (after > -np.inf)
        order = np.argsort(-np.where(complete, np.inf, after), axis=1, kind="stable")[:, :beams]
        rows = (order // classes + samples * sums.shape[1]).reshape(-1)
        sums = np.take_along_axis(after, order, axis=1)
        texts = np.concatenate([texts[rows], order.reshape(-1, 1) % classes], axis=1)
    texts = np.pad(texts, ((0, 0), (0, begin + count - texts.shape[1])), constant_values=end)
    sizes = np.minimum((texts[:, begin:] != end).sum(axis=1) + 1, count)  # with an end
    scores = sums.reshape(-1) / ((5 + sizes) / 6) ** length_penalty
    best = np.argsort(-scores.reshape(sums.shape), axis=1, kind="stable") + samples * sums.shape[1]
    return (texts[best], scores[best]) if np.ndim(text) == 2 else (texts[best[0]], scores[best[0]])


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


class _Predictor:
    """The logits after texts of which each call has one token more, from a cache if there can be.

    `others` are the inputs of the model beside the texts, the second one, each (N, ...).
    """

    def __init__(self, model: Model, length: int, others: tuple[np.ndarray, ...] = ()) -> None:
        self.model, self.length, self.others = model, length, others
        self.cache: Cached | None = None

    def after(self, text: np.ndarray, rows: Any = ...) -> np.ndarray:
        """Return the logits (N, K); `rows` are the texts before that are continued."""
        self.others = tuple(part[rows] for part in self.others)
        if self.others or text.shape[1] > self.length or not Cached.fits(self.model):
            given = (*self.others[:1], _padded(text, self.length), *self.others[1:])
            return self.model.predict(given)[:, min(text.shape[1], self.length) - 1]
        if self.cache is not None:
            return self.cache.add(text[:, -1], rows)
        self.cache = Cached(self.model, text)
        return self.cache.logits


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

    def add(self, tokens: np.ndarray, rows: Any = ...) -> np.ndarray:
        """Return the logits (N, K) after one more token of each text, or of those of these rows."""
        graph, place = self.model.graph, self.count
        at = rows if rows is ... else self.model.backend.xp.asarray(rows)
        self.cache = {node: kept[at] for node, kept in self.cache.items()}
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


def _sizes(who: str, model: Model, *, source: bool = False) -> tuple[int, int]:
    """Return the length of texts and the number of tokens of a model, perhaps with a source."""
    inputs, outputs = model.input_shapes, model.output_shapes
    at = slice(1, 2) if source else slice(None)
    right = [*inputs[at]] == [shape[:1] for shape in outputs] and len(outputs[0]) == 2
    if source and right:  # the second input is no documents
        right = any(isinstance(n.layer, Embedding) for n in model.graph.inputs[1].consumers)
    if not right:
        kind = "a source and tokens (T,)" if source else "tokens (T,)"
        raise ValueError(
            f"{who}: expected a model of {kind} to logits (T, K), got one of "
            f"{' and '.join(map(str, inputs))} to {' and '.join(map(str, outputs))}"
        )
    for ahead in filter(None, model.looks_ahead[at]):
        raise ValueError(
            f"{who}: expected logits that depend on no later token, but {ahead} looks ahead; use "
            "causal layers"
        )
    return outputs[0][0], outputs[0][1]


def _beginning(who: str, tokens: Any, classes: int) -> np.ndarray:
    """Return the beginnings (N, n) of texts as int64."""
    text = np.atleast_2d(plain_array(who, "tokens", tokens))
    whole = text.dtype.kind in "iu"
    if text.ndim != 2 or not text.shape[1] or not whole or text.min() < 0 or text.max() >= classes:
        given = f"{text.dtype} of shape {np.shape(tokens)}"
        if whole and text.size:
            given += f" in {text.min()}..{text.max()}"
        raise ValueError(
            f"{who}: tokens must be integers in 0..{classes - 1} of shape (n,) or (N, n), at least "
            f"one of each text, got {given}"
        )
    return text.astype("int64")


def _padded(text: np.ndarray, length: int) -> np.ndarray:
    """Return the last positions of texts (N, T) as floats, and zeros, on which none depends."""
    padded = np.zeros((len(text), length))
    padded[:, : text.shape[1]] = text[:, -length:]
    return padded
