"""Transformers under plans: attention by heads, vocabularies, positions, losses of parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.gpt import gpt
from models.llama import llama
from models.vit import vit
from pydtnn import Trainer
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.serial import Serial
from pydtnn.data import ArrayDataset
from pydtnn.layers import Flatten, Linear, MultiHeadAttention
from pydtnn.layers.base import StepContext
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.model.partition.ring_attention import RingAttention
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing import check_plan
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from tests.each import each

TOKENS, LENGTH, WIDTH, HEADS = 7, 5, 12, 3
N, S, STEPS = 6, 8, 3  # samples of a step, bytes per value

Axes = dict[str, int]
Net = tuple[Callable[[], Any], tuple[int, ...]]

NETS: dict[str, Net] = {
    "gpt": (
        partial(gpt, TOKENS, (LENGTH,), depth=1, heads=HEADS, width=WIDTH, dropout=0.2),
        (LENGTH,),
    ),
    "vit": (
        partial(vit, WIDTH, 1, HEADS, TOKENS, (8, 8, 3), dropout=0.1, attention_dropout=0.2),
        (8, 8, 3),
    ),
}


MESHES = [{"tensor": 4}, {"filter": 3}, {"channel": 2}, {"context": 3}, {"context": 4}]
MESHES += [{"data": 2, "context": 2}, {"tensor": 2, "context": 2}, {"context": 2, "tensor": 2}]
MESHES += [{"data": 2, "tensor": 2}, {"filter": 2, "channel": 2}]


def name_of(mesh: Axes) -> str:
    return "x".join(f"{axis}{n}" for axis, n in mesh.items())


@pytest.mark.few(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("net", NETS)
def test_a_transformer_equals_serial_training(net, mesh):
    check_plan(*NETS[net], meshes=[mesh], batch=3)


def test_ranks_with_other_numbers_of_heads_cut_positions_alike():
    check_plan(*NETS["gpt"], meshes=[{"filter": 2, "context": 2}], batch=3)  # 2 heads and 1


def test_a_transformer_in_stages_equals_serial_training():
    mesh = {"pipeline": 2, "tensor": 2}
    check_plan(*NETS["vit"], meshes=[mesh], batch=3)
    # One stage, by the embedding that gives the logits.
    with pytest.raises(ValueError, match="18 layers, some of which share parameters, got 2"):
        check_plan(*NETS["gpt"], meshes=[mesh], batch=3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mesh",
    [{"tensor": 2}, {"context": 3}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 3}],
    ids=name_of,
)
def test_groups_of_heads_equal_serial_training(mesh):
    sizes: Any = {"depth": 2, "heads": 6, "groups": 3, "width": WIDTH}
    net = partial(llama, TOKENS, (LENGTH,), **sizes, tied="pipeline" not in mesh)
    check_plan(net, (LENGTH,), meshes=[mesh], batch=3)


@pytest.mark.mpi(2)
@each("axis", ["tensor", "context"])
def test_a_transformer_equals_serial_training_on_mpi(comm, axis):
    check_plan(*NETS["gpt"], meshes=[{axis: 2}], comm=comm, batch=3)


# -- losses of parts


def data(net: str) -> ArrayDataset:
    rng = np.random.default_rng(1)
    if net == "gpt":
        x = rng.integers(TOKENS, size=(2, STEPS * N, LENGTH))
        return ArrayDataset(x[0].astype("float32"), x[1])
    return ArrayDataset(rng.normal(size=(STEPS * N, 8, 8, 3)), rng.integers(TOKENS, size=STEPS * N))


def train(comm: Communicator, net: str, axes: Axes, **options: Any) -> tuple[Any, ...]:
    """Train three steps; return losses, results of an evaluation, parameters and messages."""
    make, shape = NETS[net]
    mesh = Mesh(comm, **axes)
    model = Model(make(), shape, dtype="float64", mesh=mesh, seed=2)
    trainer = Trainer(model, "sgd", mesh=mesh, progress=False, **options)
    trainer.fit(data(net), epochs=1, batch_size=N // mesh.shape["data"])
    sent = {name: (t.messages, t.bytes) for name, t in mesh.traffic.items()}
    return trainer.losses, trainer.evaluate(data(net)), model.state(), sent


@each(
    ("net", "axes", "options"),
    [
        ("gpt", {"tensor": 3}, {"metrics": ["accuracy", "perplexity"]}),
        ("gpt", {"data": 2, "filter": 2}, {"metrics": ["accuracy"]}),
        ("vit", {"tensor": 2}, {}),
        ("gpt", {"tensor": 2}, {"metrics": ["top2_accuracy"]}),  # takes whole outputs
        ("gpt", {"context": 3}, {"metrics": ["accuracy", "perplexity"]}),
        ("gpt", {"context": 2}, {"metrics": ["top2_accuracy"]}),
        ("gpt", {"tensor": 2, "context": 2}, {}),
    ],
)
def test_losses_of_parts_are_those_of_one_rank(net, axes, options):
    ranks = int(np.prod([*axes.values()]))
    losses, results, state, _ = train(Serial(), net, {}, **options)
    for own in run_threads(ranks, lambda comm: train(comm, net, axes, **options)):
        assert own[0] == pytest.approx(losses, abs=1e-12)
        assert own[1] == pytest.approx(results, abs=1e-12)
        for name, array in state.items():
            np.testing.assert_allclose(own[2][name], array, rtol=0, atol=1e-12, err_msg=name)
        parts = "top2_accuracy" not in own[1]
        assert (own[3].get("loss", (0,))[0] > 0) is parts
        logits = "token_1" if net == "gpt" else "head.fc"
        last = "rows" if [*axes][-1] == "context" else "channels"
        before = "/channels-whole" if len({*axes} - {"data"}) > 1 else ""
        gathered = own[3].get(f"{logits}{before}/{last}-whole", (0,))[0]
        assert (gathered < STEPS) is parts  # once to choose algorithms, or never


def test_the_first_of_equal_scores_is_predicted_and_not_finite_ones_are_found():
    x = np.zeros((4, LENGTH), "float32")

    def rank(comm: Communicator) -> float:
        mesh = Mesh(comm, tensor=2)
        model = Model(*(part if i else part() for i, part in enumerate(NETS["gpt"])), mesh=mesh)
        for p in model.parameters.values():
            p.master[...] = 0
        trainer = Trainer(model, "sgd", mesh=mesh, progress=False)
        return trainer.evaluate(ArrayDataset(x, x.astype(int)))["accuracy"]

    assert run_threads(2, rank) == [1.0, 1.0]


# -- messages


def sent_in_a_pass(comm: Communicator, axis: str, loss: int) -> dict[str, tuple[int, int]]:
    """Run a GPT forward and backward; return the messages and bytes of each exchange.

    `loss` are the bytes for the loss, which is not computed, to each other rank.
    """
    mesh, others = Mesh(comm, **{axis: comm.size}), comm.size - 1
    net = gpt(TOKENS, (LENGTH,), depth=2, heads=5, width=10)
    model = Model(net, (LENGTH,), dtype="float64", mesh=mesh)
    model.cut_outputs = True
    context = StepContext(training=True, samples=np.arange(N), cut_outputs=True)
    y, saved = model.forward(np.zeros((N, LENGTH)), context)
    if axis == "context":
        assert y.shape == (N, len(range(comm.rank, LENGTH, comm.size)), TOKENS)
    model.backward(np.ones_like(y), saved)
    sent = {name: (t.messages, t.bytes) for name, t in mesh.traffic.items() if t.messages}
    assert forecast_memory(model, N).sent == sent | {"loss": (others, others * loss)}
    return sent


@each("ranks", [2, 5])
def test_a_block_reduces_and_gathers_twice(ranks):
    sums = [
        "token",
        *(f"block{i}.{name}" for i in (0, 1) for name in ("attention.out_proj", "fc2")),
    ]
    gathers = [*(f"block{i}.norm{j}" for i in (0, 1) for j in (1, 2)), "norm"]
    loss = 4 * N * LENGTH * S
    for place, sent in enumerate(run_threads(ranks, lambda c: sent_in_a_pass(c, "tensor", loss))):
        own = len(range(place, LENGTH, ranks))  # positions of this rank
        # to each other rank its part of the sum, and to all of them the own positions, which are
        # gathered again in backward
        others = ranks - 1
        added, gathered = (LENGTH - own) * N * 10 * S, others * own * N * 10 * S
        assert sent == {
            **{f"{name}/partial-rows": (2 * others, added + gathered) for name in sums},
            **{f"{name}/rows-partial": (3 * others, added + 2 * gathered) for name in gathers},
        }


@each("ranks", [2, 5])
def test_attention_of_positions_exchanges_twice(ranks):
    for place, sent in enumerate(run_threads(ranks, lambda c: sent_in_a_pass(c, "context", 16))):
        own = len(range(place, LENGTH, ranks))  # positions of this rank, and heads of 2 features
        there, back = own * (5 - own) * 2, (LENGTH - own) * own * 2
        assert sent == {
            name: (2 * (ranks - 1), blocks * (there + back) * N * S)
            for i in (0, 1)
            for name, blocks in (
                (f"block{i}.attention.in_proj/rows-heads", 3),
                (f"block{i}.attention.attention/channels-rows", 1),
            )
        }


@each("causal", [False, True])
@each("ranks", [2, 3, 4])
def test_keys_and_values_travel_around_the_ring(ranks, causal):
    length, width = 8 * ranks, 4
    x = np.random.default_rng(1).normal(size=(N, length, width))

    def rank(comm: Communicator) -> tuple[int, dict[str, tuple[int, int]]]:
        mesh = Mesh(comm, context=ranks)
        net = MultiHeadAttention(1, causal=causal, name="mha")
        model = Model(net, x.shape[1:], dtype="float64", mesh=mesh)
        y, saved = model.forward(x, StepContext(training=True, samples=np.arange(N)))
        model.backward(np.ones_like(y), saved)
        sent = {name: (t.messages, t.bytes) for name, t in mesh.traffic.items() if t.messages}
        assert forecast_memory(model, N).sent == sent
        layer = next(n.layer for n in model.graph.nodes if isinstance(n.layer, RingAttention))
        return layer.pairs(), {name: sent[name] for name in sent if "rows-whole" not in name}

    found = run_threads(ranks, rank)
    pairs = length * (length + 1) // 2 if causal else length**2
    assert [own for own, _ in found] == [pairs // ranks] * ranks  # equal work
    block = 2 * N * (length // ranks) * width * S  # keys and values of a rank
    for place, (_, sent) in enumerate(found):
        swaps = 4 * (causal and place != ranks - 1 - place)  # of half of a block each, over 2
        messages = 3 * ranks - 2
        assert sent == {"mha.attention": (messages + swaps, messages * block + swaps * block // 4)}


@each("ranks", [2, 3])
def test_the_loss_sends_four_numbers_for_each_position(ranks):
    for *_, sent in run_threads(ranks, lambda comm: train(comm, "gpt", {"tensor": ranks})):
        rows = STEPS * N * LENGTH
        assert sent["loss"] == (STEPS * (ranks - 1), (ranks - 1) * 4 * rows * S)


# -- weights


def test_weights_of_any_mesh_are_loaded_on_any_other(tmp_path):
    def save(comm: Communicator, path: Path, **axes: int) -> dict[str, np.ndarray]:
        make, shape = NETS["gpt"]
        mesh = Mesh(comm, **axes)
        trainer = Trainer(Model(make(), shape, mesh=mesh), "adam", mesh=mesh, progress=False)
        trainer.fit(data("gpt"), epochs=1, batch_size=N)
        save_checkpoint(path, trainer)
        return trainer.model.state()

    def load(comm: Communicator, path: Path, **axes: int) -> dict[str, np.ndarray]:
        make, shape = NETS["gpt"]
        mesh = Mesh(comm, **axes)
        model = Model(make(), shape, mesh=mesh, seed=5)
        load_checkpoint(path, Trainer(model, "adam", mesh=mesh, progress=False))
        return model.state()

    cut = run_threads(2, lambda comm: save(comm, tmp_path / "cut", tensor=2))
    whole = save(Serial(), tmp_path / "whole")
    others = run_threads(3, lambda comm: load(comm, tmp_path / "whole", filter=3))
    for one, other in ((load(Serial(), tmp_path / "cut"), cut[1]), (others[2], whole)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# -- refusals


def test_networks_without_sequences_and_heads_that_two_axes_cut_are_refused():
    other = [Flatten(name="flatten"), Linear(3, name="fc")]
    with pytest.raises(ValueError, match=r"^fc: .* context=2: its output of shape \(3,\) is not"):
        check_plan(other, (4, 4, 2), meshes=[{"context": 2}])
    net = gpt(9, (6,), depth=1, heads=4, width=8)
    with pytest.raises(ValueError, match="token: cannot be partitioned along the axis tensor=2"):
        check_plan(net, (6,), meshes=[{"filter": 3, "tensor": 2}])
