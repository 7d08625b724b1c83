"""Operators of ONNX that are layers of sequences: tokens, attention, recurrence; and products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isclose, sqrt
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.layers import LinearBiases, RelativePositions
from pydtnn.layers.masks import positions_seen
from pydtnn.tools.interchange.onnx.functions import decimal
from pydtnn.tools.interchange.onnx.operators import ROWS
from pydtnn.tools.interchange.onnx.readers import OPERATORS, linear
from pydtnn.tools.interchange.onnx.reading import Read, Reading, Repeated
from pydtnn.tools.interchange.onnx.views import Atom, ModelArray, Value, atoms_of, size_of

MIN_FACTOR = 0.01
"""Of scores that a mask has hidden, so that they stay so."""

MAX_MASKED_SCORE = -1e4
"""Terms of scores at most so large count as minus infinity: their exponentials vanish."""


def _gather(at: Reading) -> Value:
    """Read vectors of tokens, one index along an axis, or a range of indices."""
    data, index = at.inputs[0], at.inputs[1]
    axis = at.get("axis", 0)
    if isinstance(data, np.ndarray):
        return _embedding(at, data, index, axis)
    indices = at.required(1)
    x = data if isinstance(data, Value) and data.integer else at.value()
    place = x.axis(axis) if x.batch.size == 1 and axis == 0 else x.sample_axis(axis)
    size = x.shape[place]
    if indices.dtype.kind not in "iu" or not indices.size or indices.ndim > 1:
        raise at.fail(f"expected integers, got indices of shape {indices.shape}, {indices.dtype}")
    numbers = [n + size if n < 0 else n for n in indices.reshape(-1).tolist()]
    if min(numbers) < 0 or max(numbers) >= size:
        raise at.fail(f"indices must exist in an axis of size {size}, got {min(numbers)}")
    x = replace(x, name=at.node.name)
    start = numbers[0]
    step = numbers[1] - start if len(numbers) > 1 else 1
    if step < 1 or numbers != [*range(start, numbers[-1] + 1, step)]:
        raise at.fail("expected one index, or a range of them")
    x = at.net.part(x, place, start, numbers[-1] + 1, step)
    if indices.ndim == 0:
        x = replace(x, axes=tuple(a for i, a in enumerate(x.axes) if i != place))
    return x


def _embedding(at: Reading, matrix: np.ndarray, tokens: Any, axis: int) -> Value:
    if not isinstance(tokens, Value) or matrix.ndim != 2 or axis != 0:
        raise at.fail("expected a matrix (tokens, features) and computed tokens, with axis 0")
    if not tokens.integer:
        raise at.fail("tokens must be integers of an input, got numbers of floating point")
    tokens = at.net.plain(tokens)
    name = at.node.inputs[0]
    made = layers.Embedding(*matrix.shape, tied=len(at.graph.readers[name]) > 1)
    layer = at.net.tied.get(name, made)
    if layer.tied:
        at.net.tied[name] = layer
    node = at.net.add(at.node.name, layer, tokens.source.node, arrays={"w": matrix})
    vectors = replace(tokens, integer=False, name=at.node.name)
    return at.net.features(node, vectors, tokens.atoms, tokens.axes)


def _matmul(at: Reading) -> Value | Scores:
    a, b = at.inputs
    if isinstance(a, Value) and isinstance(b, Value):
        return _scores(at, at.lazy(0), at.lazy(1))
    matrix = at.required(1)
    if matrix.ndim != 2:
        raise at.fail(f"expected a matrix, got a constant of shape {matrix.shape}")
    x = at.value()
    tied = at.net.tied.get(at.net.transposed.get(at.node.inputs[1], ""))
    if tied is not None:
        return _logits(at, x, tied)
    added = at.graph.follower(at.node, "Add")
    bias = None
    if added is not None:
        constants = [at.values.get(name) for name in added.inputs]
        found = [c for c in constants if isinstance(c, np.ndarray)]
        width = matrix.shape[1]
        if len(found) == 1 and found[0].shape in ((width,), (1, width), (1,) * 2, (1,)):
            bias = np.broadcast_to(found[0].reshape(-1), (width,))
    last = added if added is not None and bias is not None else at.node
    y = linear(at, x, matrix.T, bias, last.name)
    at.values[last.outputs[0]] = y
    return y


def _linear(at: Reading) -> Value:
    """Read the product of the last axis with a matrix (O, I), which may be that of tokens."""
    tied = at.net.tied.get(at.node.inputs[1])
    if tied is None:
        return linear(at, at.value(), at.required(1), at.constant(2), at.node.name)
    if at.constant(2) is not None:
        raise at.fail("logits of the matrix of tokens must have no bias")
    return _logits(at, at.value(), tied)


def _logits(at: Reading, x: Value, embedding: layers.Embedding) -> Value:
    """Read a product with the matrix of tokens."""
    x = at.net.plain(x)
    node = at.net.add(at.node.name, embedding, x.source.node)
    return at.net.features(node, replace(x, name=at.node.name), x.atoms[:-1], x.axes[:-1])


# -- attention


@dataclass(frozen=True, eq=False)
class Scores:
    """Products of queries and keys of attention, or the weights that Softmax makes of them.

    Attributes
    ----------
    q, k : Value
        Of axes (..., T, E), which are the same but T.
    factor : float
    terms : ndarray or None
        What is added, (heads or 1, T1, T2); at most `MAX_MASKED_SCORE` for keys that are hidden.
    weights : bool
        Whether Softmax has been computed.
    dropout : float
        Rate of weights that are dropped in training.
    lengths : Value or None
        Numbers of keys of samples, (N, 1), which are the first ones.
    rows : tuple of str and ndarray, or None
        The matrix (buckets, heads) whose rows are terms, and their indices (T1, T2).
    """

    q: Value
    k: Value
    factor: float
    terms: np.ndarray | None = None
    weights: bool = False
    dropout: float = 0.0
    lengths: Value | None = None
    rows: tuple[str, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class Padding:
    """A mask of keys that do not exist, of computed lengths (N, 1), and further terms of scores."""

    lengths: Value
    terms: np.ndarray


def _scores(at: Reading, q: Value, k: Value) -> Scores:
    """Read the product of queries and keys."""
    rank = len(q.axes)
    if rank != len(k.axes) or rank < 3:
        raise at.fail(
            f"expected a constant matrix, or queries and keys, got {q.given} and {k.given}"
        )
    k = k.transposed([*range(rank - 2), rank - 1, rank - 2])
    if (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        raise at.fail(f"queries and keys must have the same heads, got {q.given} and {k.given}")
    factor = q.factor * k.factor
    q, k = (replace(x, factor=1.0, name=at.node.name) for x in (q, k))
    return Scores(q, k, factor)


def read_scores(at: Reading) -> Scores | Value:
    """Read a node that has scores or weights of attention as an input.

    Raises
    ------
    ValueError
        If it is not a part of attention.
    """
    places = [i for i, x in enumerate(at.inputs) if isinstance(x, Scores)]
    scores, operator = at.inputs[places[0]], at.node.operator
    others = [x for i, x in enumerate(at.inputs) if i not in places]
    constant = others[0] if others and isinstance(others[0], np.ndarray) else None
    if operator == "Add" and isinstance(others[0], Padding):
        scores = replace(scores, lengths=others[0].lengths, rows=at.get("rows", scores.rows))
        return replace(scores, terms=_terms(at, scores, others[0].terms))
    if scores.weights:
        if operator == "Dropout" and constant is not None:
            return replace(scores, dropout=decimal(float(constant.reshape(()))))
        fits = operator == "MatMul" and places == [0] and isinstance(others[0], Value)
        return _attention(at, scores, at.value(1)) if fits else _no_part(at)
    if operator == "Softmax":
        rank = len(scores.q.axes)
        axis = at.get("axis", -1 if at.graph.opset >= 13 else 1)
        if axis not in (-1, rank - 1):
            raise at.fail(f"the axis must be the last of attention's scores, got {axis}")
        return replace(scores, weights=True)
    if (
        operator == "Where"
        and places in ([1], [2])
        and all(isinstance(x, np.ndarray) for x in others)
    ):
        hidden, term = others
        constant, operator = np.where(hidden if places == [2] else ~hidden, term, 0.0), "Add"
    elif constant is None or len(at.inputs) != 2:
        return _no_part(at)
    if operator == "Add":
        rows = at.get("rows", scores.rows)
        scores = replace(scores, terms=_terms(at, scores, constant), rows=rows)
        _options(at, scores)  # refuses masks that no layer has
        return scores
    if constant.size != 1 or not (operator == "Mul" or (operator == "Div" and places == [0])):
        return _no_part(at)
    number = float(constant.reshape(()))
    factor = number if operator == "Mul" else 1 / number if number else 0.0
    terms = scores.terms
    if terms is not None and not factor >= MIN_FACTOR:
        raise at.fail(f"masked scores must have a factor above {MIN_FACTOR}, got {factor:.6g}")
    terms = None if terms is None else terms * factor
    return replace(scores, factor=scores.factor * factor, terms=terms)


def _no_part(at: Reading) -> Value:
    raise at.fail(
        "expected attention: a product of queries and keys, a factor, perhaps a mask, Softmax over "
        "keys, and a product with values; got other operators of such products"
    )


def _terms(at: Reading, scores: Scores, given: np.ndarray) -> np.ndarray:
    """Return the sum of terms of scores, (heads or 1, T1, T2); ValueError if samples differ."""
    shape, heads = (scores.q.shape[-2], scores.k.shape[-2]), _heads(scores)
    try:
        rows = np.broadcast_to(given, (*given.shape[:-2], *shape)).reshape(-1, *shape)
        first = rows[:1] if (rows == rows[:1]).all() else rows[:heads]
        same = len(first) in (1, heads) and (rows.reshape(-1, *first.shape) == first).all()
    except ValueError as error:
        raise at.fail(f"a mask must be that of {shape} positions, got {given.shape}") from error
    if not same:
        raise at.fail(f"a mask must be the same for all samples, got one of shape {given.shape}")
    first = np.where(first > MAX_MASKED_SCORE, first, -np.inf)
    return first if scores.terms is None else scores.terms + first


def _heads(scores: Scores) -> int:
    q = scores.q
    return size_of(atom for axis in q.axes[:-2] for atom in axis if atom is not q.batch)


def _options(at: Reading, scores: Scores) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return options of a layer for the terms of scores, and its arrays."""
    heads = _heads(scores)
    options: dict[str, Any] = {"dropout": scores.dropout}
    factor = scores.factor * sqrt(scores.q.shape[-1])
    if not isclose(factor, 1, rel_tol=1e-5):  # the layer's own is that of the square root
        options["scale"] = decimal(scores.factor)
    if scores.terms is None:
        return options, {}
    _, queries, keys = scores.terms.shape
    at_key = np.arange(keys)
    ahead, seen = at_key - np.arange(queries)[:, None], scores.terms > MAX_MASKED_SCORE
    reach = int(abs(ahead[seen.any(0)]).max(initial=0)) + 1
    for options["causal"], options["window"] in product((False, True), (None, reach)):
        intervals = positions_seen(queries, keys, options["causal"], options["window"])[0]
        if (seen == ((at_key >= intervals[:, :1]) & (at_key < intervals[:, 1:]))).all():
            break
    else:
        raise at.fail(
            "a mask must hide later positions, or those outside a window, or both, got another one"
        )
    terms, slopes = np.where(seen, scores.terms, 0), LinearBiases().slopes(heads)
    if scores.rows is not None:
        name, indices = scores.rows
        table, at.net.reads = at.values[name], (name,)
        for both in (True, False):
            positions = RelativePositions(len(table), bidirectional=both)
            same = (positions.bucket(ahead) == indices) & (table.T[:, indices] == terms)
            if (same | ~seen).all():
                return options | {"positions": positions}, {"positions": table}
    if not terms.any():
        return options, {}
    linear = np.where(seen, terms + slopes[:, None, None] * abs(ahead), np.nan)
    if np.allclose(np.nanmin(linear, -1), np.nanmax(linear, -1), rtol=0, atol=1e-7):
        return options | {"positions": LinearBiases()}, {}
    buckets = 4 * max(queries, keys)
    options["positions"] = positions = RelativePositions(buckets, buckets)
    table, places = np.zeros((buckets, heads)), positions.bucket(ahead)
    table[places[seen.any(0)]] = np.moveaxis(np.broadcast_to(terms, (heads, queries, keys)), 0, -1)[
        seen.any(0)
    ]
    if (seen & (table.T[:, places] != terms)).any():
        raise at.fail("terms of scores must be those of distances, got others")
    return options, {"positions": table}


def _attention(at: Reading, scores: Scores, v: Value) -> Value:
    """Read the product of weights and values."""
    q, k = scores.q, scores.k
    if k.shape != v.shape:
        raise at.fail(f"values must have the shape of keys {k.given}, got {v.given}")
    parts = (q, k, replace(v, name=at.node.name))
    if any([x.batch in axis for axis in x.axes] != [q.batch in a for a in q.axes] for x in parts):
        raise at.fail("queries, keys and values must have the batch along the same axis")
    orders = [_heads_last(at, x) for x in parts]
    features = size_of(orders[0]) // q.shape[-2]
    options, arrays = _options(at, scores)
    own = q.shape == k.shape and scores.lengths is None
    whole = _projection(at, parts, orders, features) if own else None
    nodes = (
        [whole]
        if whole
        else [
            at.net.arrange(x, order, (x.shape[-2], features))
            for x, order in zip(parts, orders, strict=True)
        ]
    )
    layer = (layers.DotProductAttention if own else layers.CrossAttention)(
        _heads(scores), **options
    )
    if own and not whole:
        nodes = [at.net.add(f"{at.node.name}.joined", layers.Concat(), *nodes)]
    elif not own:
        nodes[1:] = [at.net.add(f"{at.node.name}.keys", layers.Concat(), *nodes[1:])]
        nodes += [at.net.plain(scores.lengths).source.node] if scores.lengths else []
    made = at.net.add(at.node.name, layer, *nodes, arrays=arrays)
    atoms = tuple(Atom(atom.size) for atom in orders[0])
    place = dict(zip(orders[0], atoms, strict=True))
    axes = tuple(tuple(place.get(atom, atom) for atom in axis) for axis in q.axes)
    return Value(ModelArray(made), atoms, axes, q.batch, at.node.name)


def _heads_last(at: Reading, x: Value) -> tuple[Atom, ...]:
    """Return the atoms of queries in the order (positions, heads, features of a head)."""
    *outer, positions, features = x.axes
    if x.batch in (*positions, *features):
        raise at.fail(f"the last two axes must be positions and features, got {x.given}")
    heads = [atom for axis in outer for atom in axis if atom is not x.batch]
    return (*positions, *heads, *features)


def _projection(
    at: Reading, parts: Sequence[Value], orders: Sequence[tuple[Atom, ...]], features: int
) -> Any:
    """Return the array (T, 3 D) of which queries, keys and values are the thirds, or None."""
    whole = parts[0].source.whole
    thirds = [(whole, i * features) for i in range(3)]
    if whole is None or [(x.source.whole, x.source.start) for x in parts] != thirds:
        return None
    if any(x.atoms != order for x, order in zip(parts, orders, strict=True)):
        return None
    node, length = whole.node, size_of(orders[0]) // features
    if node.shape not in ((length, 3 * features), (3 * features,)):
        return None
    return at.net.reshape(node, (length, 3 * features), f"{at.node.name}.positions")


# -- recurrence


KINDS: Mapping[str, type[layers.LSTMLayer] | type[layers.GRULayer]] = {
    "LSTM": layers.LSTMLayer,
    "GRU": layers.GRULayer,
}


def _recurrent(at: Reading) -> list[Value]:
    """Read the states of all steps, ``(T, D, N, H)``, and the last h and c, ``(D, N, H)``."""
    kind, features, reverse = _directions(at)
    given = at.inputs[4] if len(at.inputs) > 4 else None
    lengths = [] if given is None else [at.net.plain(given).source.node]
    further = at.node.outputs[1 if lengths else 2 :]
    ends = any(name in {*at.graph.readers, *at.graph.outputs} for name in further)
    x = at.value()
    x = at.net.plain(x.transposed([1, 0, 2]))
    length, inputs = (size_of(axis) for axis in x.axes[1:])
    node = at.net.reshape(x.source.node, (length, inputs), f"{at.node.name}.steps")
    firsts = [at.value(i) for i, x in enumerate(at.inputs) if i > 4 and isinstance(x, Value)]
    states = [
        at.net.add(
            f"{at.node.name}_reverse" if backward else at.node.name,
            kind(features, reverse=backward, bias=at.constant(3) is not None, return_states=ends),
            node,
            *lengths,
            *(at.net.plain(_direction(at, first, d)).source.node for first in firsts),
            arrays=_arrays(at, kind, d),
        )
        for d, backward in enumerate(reverse)
    ]

    def rows(cut: slice, state: Any) -> Any:
        return at.net.add(f"{at.node.name}.rows", layers.Slice(cut), state)

    def all_steps() -> Any:
        name = f"{at.node.name}.directions"
        every = [rows(slice(0, length), state) if ends else state for state in states]
        return at.net.add(name, layers.Concat(), *every) if len(every) > 1 else every[0]

    steps, both, units = map(atoms_of, (length, len(states), features))
    axes: tuple[tuple[Atom, ...], ...] = (steps, both, x.batch_axis, units)
    atoms = (*steps, *both, *units)
    every = Value(ModelArray(all_steps), atoms, axes, x.batch, at.node.name)

    def last(which: int) -> Any:
        """Add slices of the last h or c of all directions."""
        places = [length + which if ends else 0 if b else length - 1 for b in reverse]
        parts = [rows(slice(i, i + 1), state) for i, state in zip(places, states, strict=True)]
        joined = parts[0]
        if len(parts) > 1:
            joined = at.net.add(f"{at.node.name}.lasts", layers.Concat(), *parts)
        return at.net.reshape(joined, (len(parts) * features,), f"{at.node.name}.state")

    two, wide = map(atoms_of, (len(states), features))
    axes = (two, x.batch_axis, wide)
    return [
        every,
        *(
            Value(ModelArray(partial(last, i)), (*two, *wide), axes, x.batch, at.node.name)
            for i in range(kind.carried)
        ),
    ]


def _direction(at: Reading, states: Value, direction: int) -> Value:
    """Return the states (N, H) of a direction of those before the first step, (D, N, H)."""
    part = at.net.part(replace(states, name=f"{at.node.name}.first"), 0, direction, direction + 1)
    return replace(part, axes=part.axes[1:])


def _directions(
    at: Reading,
) -> tuple[type[layers.LSTMLayer] | type[layers.GRULayer], int, tuple[bool, ...]]:
    """Return the kind, the units, and whether each direction is reversed.

    Raises
    ------
    ValueError
        If the operator has attributes or inputs that the layers do not have.
    """
    operator, kind = at.node.operator, KINDS[at.node.operator]
    directions = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    direction = at.get("direction", "forward")
    if direction not in directions:
        raise at.fail(f"direction must be one of {', '.join(directions)}, got {direction}")
    reverse = directions[direction]
    weights, recurrent = at.required(1), at.required(2)
    features = recurrent.shape[-1] if recurrent.ndim == 3 else 0
    expected = (len(reverse), kind.gates * features)
    if weights.ndim != 3 or not features or recurrent.shape[:2] != expected:
        raise at.fail(f"expected matrices of {direction} {operator}, got {recurrent.shape}")
    usual = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}[operator]
    usual *= len(reverse)
    functions = [
        name.decode() if isinstance(name, bytes) else name for name in at.get("activations", usual)
    ]
    others = {"clip": None, "input_forget": 0, "activation_alpha": None, "layout": 0}
    other = any(at.get(name, default) != default for name, default in others.items())
    if functions != usual or other:
        raise at.fail("expected the usual functions sigmoid and tanh, without other options")
    if operator == "GRU" and not at.get("linear_before_reset", 0):
        raise at.fail("linear_before_reset must be 1: the reset gate is applied to the product")
    if len(at.inputs) > 4 and isinstance(at.inputs[4], np.ndarray):
        raise at.fail("expected sequences of full length, or computed sequence_lens")
    firsts = [first.array if isinstance(first, Repeated) else first for first in at.inputs[5:]]
    if [isinstance(first, Value) for first in firsts] == [True] * kind.carried:
        if features * kind.carried == 1:
            raise at.fail("a state of one unit must not be computed: it would be a length")
    elif not all(a is None or (isinstance(a, np.ndarray) and not _any(a)) for a in firsts):
        raise at.fail(
            "states before the first step must all be computed, or zeros, and peepholes be omitted"
        )
    return kind, features, reverse


def _any(array: np.ndarray) -> bool:
    """Return whether an element is not 0, of an array that may be repeated without memory."""
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    return bool(once.any())


def _arrays(
    at: Reading, kind: type[layers.LSTMLayer] | type[layers.GRULayer], direction: int
) -> dict[str, np.ndarray]:
    """Return the arrays of a direction, with the gates in the order of the layer."""
    order = np.argsort(ROWS[kind])

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(kind.gates, -1, *array.shape[1:])[order].reshape(array.shape)

    arrays = {"w": rows(at.required(1)[direction]), "u": rows(at.required(2)[direction])}
    biases = at.constant(3)
    if biases is None:
        return arrays
    b, b_u = np.split(biases[direction], 2)
    return arrays | {"b": rows(b), "b_u": rows(b_u)}


READERS: Mapping[str, Read] = {
    **OPERATORS,
    "GRU": _recurrent,
    "Gather": _gather,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "linear": _linear,
    "padding": lambda at: Padding(at.value(), at.required(1)),
}
"""Functions that read an operator; others cannot be imported."""

PARTS_OF_ATTENTION = frozenset({"Where"})
"""Further operators that are read as parts of attention only."""
