"""Attention with masks, biases and a second sequence along each axis of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import create_backend
from pydtnn.kernels.observed import wrapped_kernels
from pydtnn.layers import (
    Add,
    Block,
    LayerNorm,
    LinearBiases,
    MultiHeadAttention,
    MultiHeadCrossAttention,
    RelativePositions,
    StepContext,
)
from pydtnn.layers.masks import documents
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.model.partition.ring_attention import RingAttention
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing import check_plan
from tests.each import each

LENGTH, WIDTH = 9, 12

Axes = dict[str, int]


class Attending(Block):
    """A layer of a transformer, with a second input of which attention reads what exists."""

    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(heads, name="attention", dropout=0.2, **options)

    def wire(self, graph: Any, *inputs: Any) -> Any:
        x, *mask = inputs
        attended = graph.add(self.attention, graph.add(LayerNorm(name="norm"), x), *mask)
        return graph.add(Add(), x, attended)


class Decoding(Block):
    """Attention of a sequence to itself, and to another one, which also attends to itself."""

    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, {"dropout": 0.2, **options}

    def wire(self, graph: Any, *inputs: Any) -> Any:
        x, memory, *lengths = inputs
        encoder = MultiHeadAttention(self.heads, name="encoder")
        memory = graph.add(encoder, memory, *lengths)
        x = graph.add(MultiHeadAttention(self.heads, causal=True, name="own"), x)
        across = MultiHeadCrossAttention(self.heads, name="across", **self.options)
        again = MultiHeadCrossAttention(self.heads, name="again")
        x = graph.add(Add(), x, graph.add(across, x, memory, *lengths))
        return graph.add(again, x, memory, *lengths)


SEQUENCE, SAMPLES, IDS = (LENGTH, WIDTH), (1,), (LENGTH,)
ONE: tuple[Any, ...] = (SEQUENCE,)
PADDED, PACKED = (SEQUENCE, SAMPLES), (SEQUENCE, IDS)
TWO: tuple[Any, ...] = (SEQUENCE, (7, WIDTH))
POSITIONS = partial(RelativePositions, 6, 5, initializer="glorot_uniform")
ONE_SIDED = POSITIONS(bidirectional=False)

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "causal, window": (Attending, ONE, {"causal": True, "window": 3}),
    "window": (Attending, ONE, {"window": 3, "scale": 0.7}),
    "lengths": (Attending, PADDED, {}),
    "causal, lengths, slopes": (Attending, PADDED, {"causal": True, "positions": LinearBiases()}),
    "documents": (Attending, PACKED, {}),
    "causal, documents": (Attending, PACKED, {"causal": True}),
    "slopes": (Attending, ONE, {"positions": LinearBiases()}),
    "positions": (Attending, ONE, {"positions": POSITIONS()}),
    "causal, documents, positions": (Attending, PACKED, {"causal": True, "positions": ONE_SIDED}),
    "across": (Decoding, TWO, {}),
    "across, lengths": (Decoding, (*TWO, SAMPLES), {"positions": LinearBiases()}),
    "across, causal, positions": (Decoding, TWO, {"causal": True, "positions": POSITIONS()}),
}

HEADS: dict[str, tuple[int, Axes]] = {
    "data": (2, {"data": 2}),
    "tensor": (3, {"tensor": 3}),
    "ring of 2": (1, {"context": 2}),
    "ring of 3": (2, {"context": 3}),
    "ring of 4": (3, {"context": 4}),
    "all-to-all": (4, {"context": 3}),
    "pipeline": (2, {"pipeline": 2}),
    "two axes": (2, {"tensor": 2, "context": 2}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("where", HEADS)
@pytest.mark.parametrize("case", CASES)
def test_attention_on_each_axis_equals_serial_training(case, where):
    kind, shapes, options = CASES[case]
    heads, mesh = HEADS[where]
    net = partial(kind, heads, **options)
    check_plan(net, shapes if len(shapes) > 1 else shapes[0], meshes=[mesh], batch=3)


# -- work and messages of the ring


def ring_of(comm: Communicator, shapes: Sequence[Any], **options: Any) -> tuple[Model, Any]:
    mesh, backend = Mesh(comm, context=comm.size), create_backend("cpu", threads=1)
    net = MultiHeadAttention(1, **options)
    model = Model(net, tuple(shapes), dtype="float64", mesh=mesh, backend=backend)
    return model, next(n.layer for n in model.graph.nodes if isinstance(n.layer, RingAttention))


@each(
    ("options", "halves", "pairs"),
    [
        ({}, False, [8 * 32] * 4),
        ({"causal": True}, True, [32 * 33 // 8] * 4),
        ({"causal": True, "window": 4}, False, [4 * 8 - 6, *[4 * 8] * 3]),
        ({"causal": True, "window": 20}, True, [10 + 80, 42 + 80, 74 + 58, 26 + 80]),
    ],
)
def test_ranks_take_halves_of_each_other_if_the_largest_work_is_smaller(options, halves, pairs):
    def rank(comm: Communicator) -> tuple[bool, int]:
        layer = ring_of(comm, [(32, 4)], **options)[1]
        return any(owner != rank for owner, rank, *_ in layer.usual), layer.pairs()

    assert run_threads(4, rank) == [(halves, own) for own in pairs]


def test_blocks_that_no_query_sees_are_not_multiplied_and_messages_are_foreseen():
    ids = np.repeat([[1.0, 2.0, 3.0, 0.0]] * 3, 4, axis=1)  # (3, 16), a document on each rank
    x = np.random.default_rng(0).normal(size=(3, 16, 4))

    def rank(comm: Communicator) -> tuple[int, bool]:
        model, _ = ring_of(comm, [(16, 4), (16,)], positions=POSITIONS())
        calls: list[str] = []

        def counted(kernel: Any, name: str) -> Any:
            return lambda *xs, **options: calls.append(name) or kernel(*xs, **options)

        with wrapped_kernels(model.backend, counted):
            y, saved = model.forward((x, ids), StepContext(training=True, samples=np.arange(3)))
            model.backward(np.ones_like(y), saved)
        assert model.mesh is not None
        sent = {name: (t.messages, t.bytes) for name, t in model.mesh.traffic.items() if t.messages}
        assert forecast_memory(model, 3).sent == sent
        return calls.count("attention.forward"), calls.count("attention.backward")

    assert run_threads(4, rank) == [(1, 1)] * 3 + [(0, 0)]


def test_queries_of_documents_are_divided_by_their_work():
    samples = ([16, 8, 4, 4], [20, 6, 6], [32]), ([20, 8, 4], [8, 24], [20, 8, 4])

    def rank(comm: Communicator) -> list[tuple[list[int], list[int]]]:
        layer, found = ring_of(comm, [(32, 4), (32,)], causal=True)[1], []
        for rows in samples:
            exist = documents(np.array([np.repeat(np.arange(len(r)) + 1, r) for r in rows]))
            work = sum(np.concatenate([np.arange(n) + 1 for n in row]) for row in rows)
            pieces = layer.balanced(exist)
            found.append((layer.work(layer.usual, work), layer.work(pieces, work)))
        return found

    for usual, balanced in [pair for own in run_threads(4, rank) for pair in own]:
        assert sum(usual) == sum(balanced)
        assert max(balanced) < 1.15 * sum(usual) / 4 < max(usual)
