"""Attention with masks, biases and a second sequence along each axis of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import Trainer
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.serial import Serial
from pydtnn.data import ArrayDataset
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
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.model.partition.ring_attention import RingAttention
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import ShardedParameters
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
TWO: tuple[Any, ...] = (SEQUENCE, (7, WIDTH))
POSITIONS = partial(RelativePositions, 6, 5, initializer="glorot_uniform")

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "causal, window": (Attending, ONE, {"causal": True, "window": 3}),
    "window": (Attending, ONE, {"window": 3, "scale": 0.7}),
    "lengths": (Attending, (SEQUENCE, SAMPLES), {}),
    "causal, lengths, slopes": (
        *(Attending, (SEQUENCE, SAMPLES)),
        {"causal": True, "positions": LinearBiases()},
    ),
    "documents": (Attending, (SEQUENCE, IDS), {}),
    "causal, documents": (Attending, (SEQUENCE, IDS), {"causal": True}),
    "slopes": (Attending, ONE, {"positions": LinearBiases()}),
    "positions": (Attending, ONE, {"positions": POSITIONS()}),
    "causal, documents, positions": (
        *(Attending, (SEQUENCE, IDS)),
        {"causal": True, "positions": POSITIONS(bidirectional=False)},
    ),
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


@pytest.mark.few(7)
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
    x, target = np.random.default_rng(0).normal(size=(2, 3, 32, 12))

    def rank(comm: Communicator, ids: np.ndarray) -> tuple[list[int], list[float], Any]:
        mesh, pairs = Mesh(comm, context=comm.size), []
        net = Attending(1, causal=True)
        model = Model(net, ((32, 12), (32,)), dtype="float64", mesh=mesh, seed=1)

        def counted(kernel: Any, name: str) -> Any:
            def call(*xs: Any, seen: Any, **options: Any) -> Any:
                pairs.append((seen[..., 1] - seen[..., 0]).sum())
                return kernel(*xs, seen=seen, **options)

            return call if name == "attention.forward" else kernel

        with wrapped_kernels(model.backend, counted):
            model.forward((x, ids), StepContext(training=True, samples=np.arange(3)))
        trainer = Trainer(model, "sgd", loss="mse", mesh=mesh, progress=False)
        trainer.fit(ArrayDataset((x, ids), target), epochs=2, global_batch_size=3)
        return pairs, trainer.losses, model.state()

    for rows in ([16, 8, 4, 4], [20, 6, 6], [32]), ([20, 8, 4], [8, 24], [20, 8, 4]):
        ids = np.array([np.repeat(np.arange(len(row)) + 1.0, row) for row in rows])
        pairs, losses, state = rank(Serial(), ids)
        found = run_threads(4, partial(rank, ids=ids))
        work = [sum(own) for own, _, _ in found]
        each_one = sum(np.concatenate([1 + np.arange(n) for n in row]) for row in rows)
        usual = [each_one[8 * r :][:4].sum() + each_one[28 - 8 * r :][:4].sum() for r in range(4)]
        assert sum(work) == sum(usual) == sum(pairs)
        assert max(work) < 1.15 * sum(pairs) / 4 < max(usual)
        for _, own, arrays in found:
            assert own == pytest.approx(losses, abs=1e-12)
            for name, array in state.items():
                np.testing.assert_allclose(arrays[name], array, rtol=0, atol=1e-12, err_msg=name)


# -- data parallelism


def trained(comm: Communicator, scheme: Any, **options: Any) -> tuple[list[float], Any]:
    _, shapes, _ = CASES["across, lengths"]
    mesh = Mesh(comm, data=comm.size)
    model = Model(Decoding(2, positions=POSITIONS()), shapes, dtype="float64", mesh=mesh, seed=2)
    rng = np.random.default_rng(1)
    xs = [*(rng.normal(size=(12, *shape)) for shape in TWO), rng.integers(1, 8, size=(12, 1)) * 1.0]
    exchange = scheme(comm, **options)
    trainer = Trainer(model, "adam", loss="mse", mesh=mesh, exchange=exchange, progress=False)
    trainer.fit(ArrayDataset(tuple(xs), rng.normal(size=(12, *SEQUENCE))), global_batch_size=4)
    return trainer.losses, model.state()


@each(("scheme", "exact"), [(ShardedParameters, False), (AllReduce, True)])
def test_attention_to_a_second_sequence_trains_on_ranks_with_other_samples(scheme, exact):
    options = {"sums": partial(ExactSums, shards=4)} if exact else {}
    losses, state = trained(Serial(), AllReduce, **options)
    for own, arrays in run_threads(2, lambda comm: trained(comm, scheme, **options)):
        assert own == losses if exact else own == pytest.approx(losses, abs=1e-12)
        for name, array in state.items():
            limit = 0 if exact else 1e-12
            np.testing.assert_allclose(arrays[name], array, rtol=0, atol=limit, err_msg=name)
