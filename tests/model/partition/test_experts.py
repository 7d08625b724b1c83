"""Experts that are divided over ranks: equality with one rank, messages, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from models.gpt import gpt
from models.llama import llama
from pydtnn import Trainer
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.serial import Serial
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear, MixtureOfExperts, Sequential
from pydtnn.layers.base import Penalties, StepContext
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing import check_plan
from tests.each import each

TOKENS, LENGTH, N = 7, 5, 6
GPT = partial(gpt, TOKENS, (LENGTH,), depth=2, heads=3, width=12, balance=0.3, z=0.2)
LLAMA = partial(llama, TOKENS, (LENGTH,), depth=1, heads=2, width=8, balance=0.3, z=0.2)
NETS: dict[str, Any] = {
    "switch": partial(GPT, experts=5, choices=1, capacity=0.8),
    "gshard": partial(GPT, experts=4, capacity=1.0),
    "mixtral": partial(LLAMA, experts=7),
}
Axes = dict[str, int]


@pytest.mark.few(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "mesh",
    [
        {"expert": 3},
        {"m": 2},  # samples along another axis are gathered for experts
        {"data": 2, "expert": 2},
        {"expert": 2, "tensor": 2},
        {"context": 2, "expert": 2},
        {"filter": 2, "expert": 2},
    ],
    ids=lambda mesh: "x".join(f"{axis}{n}" for axis, n in mesh.items()),
)
@pytest.mark.parametrize("net", NETS)
def test_divided_experts_equal_serial_training(net, mesh):
    plan = {"*": {"data": "m"}} if "m" in mesh else None
    check_plan(NETS[net], (LENGTH,), plan, meshes=[mesh], batch=5)


@pytest.mark.filterwarnings("ignore:Trainer")  # of few micro-batches
@each(("schedule", "mesh"), [("1f1b", {"pipeline": 2, "expert": 2}), ("zb_v", {"pipeline": 2})])
def test_losses_of_routers_in_all_stages_count(schedule, mesh):
    net = partial(NETS["gshard"], tied=False)
    ranks, serial = int(np.prod([*mesh.values()])), train(Serial(), {}, net())
    own = {"micro_batches": 3, "pipeline_schedule": schedule}
    for trainer in run_threads(ranks, lambda comm: train(comm, mesh, net(), **own)):
        assert trainer.losses == pytest.approx(serial.losses, abs=1e-12)


@pytest.mark.mpi(2)
def test_divided_experts_equal_serial_training_on_mpi(comm):
    check_plan(NETS["gshard"], (LENGTH,), meshes=[{"expert": comm.size}], comm=comm, batch=5)


def train(
    comm: Communicator, axes: Axes, net: Any, pipeline_schedule: str = "1f1b", **options: Any
) -> Trainer:
    rng = np.random.default_rng(1)
    x, y = rng.integers(TOKENS, size=(2, 3 * N, LENGTH))
    mesh = Mesh(comm, **axes)
    schedule: Any = {"pipeline_schedule": pipeline_schedule} if "pipeline" in axes else {}
    model = Model(net, (LENGTH,), dtype="float64", mesh=mesh, seed=2, **schedule)
    trainer = Trainer(model, "adam", mesh=mesh, progress=False, **options)
    data = ArrayDataset(x.astype("float32"), y)
    trainer.fit(data, epochs=1, batch_size=N // mesh.shape["data"])
    return trainer


@pytest.mark.filterwarnings("ignore:Trainer")  # of few micro-batches
@each("axes", [{"expert": 3}, {"data": 2, "expert": 2}])
def test_losses_are_those_of_one_rank_and_samples_may_be_few(axes):
    ranks, net = int(np.prod([*axes.values()])), NETS["switch"]
    serial = train(Serial(), {}, net(), accumulation=3)
    for own in run_threads(ranks, lambda comm: train(comm, axes, net(), accumulation=3)):
        assert own.losses == pytest.approx(serial.losses, abs=1e-12)


# -- messages


@each("ranks", [2, 3])
def test_rows_travel_to_their_experts_and_back(ranks):
    experts, width, samples, values = 5, 3, 7, 8
    x = np.random.default_rng(3).normal(size=(samples, LENGTH, width))
    net = partial(MixtureOfExperts, experts, 4, capacity=0.8, name="moe")
    serial = Model(net(), x.shape[1:], dtype="float64")
    context = StepContext(training=True, samples=np.arange(samples), penalties=Penalties(1.0))
    _, saved = serial.forward(x, context)
    routes, *_ = saved[-1]

    def rank(comm: Communicator) -> dict[str, tuple[int, int]]:
        mesh = Mesh(comm, expert=ranks)
        model = Model(net(), x.shape[1:], dtype="float64", mesh=mesh, input_gradient=True)
        own = StepContext(training=True, samples=np.arange(samples), penalties=Penalties(1.0))
        y, saved = model.forward(x, own)
        model.backward(np.ones_like(y), saved)
        assert own.penalties is not None
        assert context.penalties is not None
        assert own.penalties.values == pytest.approx(context.penalties.values, abs=1e-12)
        return {name: (t.messages, t.bytes) for name, t in mesh.traffic.items() if t.messages}

    owner_of = np.array_split(np.arange(experts), ranks)
    sample_of = np.array_split(np.arange(samples), ranks)
    table = np.zeros((ranks, ranks), int)  # rows from a rank to another one
    for slot in routes.slots:
        sample = slot // (LENGTH * 2)
        expert = routes.chosen.reshape(-1)[slot]
        source = next(r for r in range(ranks) if sample in sample_of[r])
        table[source, next(r for r in range(ranks) if expert in owner_of[r])] += 1
    for place, sent in enumerate(run_threads(ranks, rank)):
        others = ranks - 1
        rows = table[place].sum() + table[:, place].sum() - 2 * table[place, place]
        numbers = experts - len(owner_of[place]) + others
        nbytes = 2 * rows * width * values + 8 * numbers
        assert sent["moe.experts"] == (5 * others, nbytes)


@each("ranks", [2, 4])
def test_the_forecast_is_that_of_experts_that_are_chosen_equally_often(ranks):
    width, choices, samples, values = 6, 2, 8, 4

    def rank(comm: Communicator) -> dict[str, tuple[int, int]]:
        net = Sequential(MixtureOfExperts(4, 5, choices=choices, name="moe"), Linear(2))
        model = Model(net, (8, width), mesh=Mesh(comm, expert=ranks), input_gradient=True)
        assert model.parameters["moe.experts.up"].shape == (4 // ranks, 5, width)
        assert model.summary(samples)
        return dict(forecast_memory(model, samples).sent)

    volume = 4 * (ranks - 1) / ranks**2 * choices * samples * 8 * width * values
    for sent in run_threads(ranks, rank):
        numbers = 8 * (ranks - 1) * (4 // ranks + 1)
        assert sent["moe.experts"] == (5 * (ranks - 1), round(volume) + numbers)


@each("ranks", [2, 3, 5])
def test_operations_of_all_ranks_are_those_of_one(ranks):
    def rank(comm: Communicator) -> int:
        mesh = Mesh(comm, expert=ranks)
        model = Model(MixtureOfExperts(5, 4, name="moe"), (8, 6), mesh=mesh)
        return model.layers["moe.experts"].cost(5).flops_forward  # of 5 own samples

    one = Model(MixtureOfExperts(5, 4, name="moe"), (8, 6)).layers["moe.experts"]
    own = run_threads(ranks, rank)
    assert sum(own) == one.cost(5 * ranks).flops_forward
    assert own[0] >= own[-1]  # the first ranks have one expert more


# -- refusals


def test_fewer_experts_than_ranks_are_refused():
    words = r"^block0\.moe\.experts: cannot be .* expert=3: experts must be at least the 3 ranks"
    with pytest.raises(ValueError, match=words):
        check_plan(partial(GPT, experts=2), (LENGTH,), meshes=[{"expert": 3}])


def test_a_network_without_experts_is_refused():
    words = "^Plan: expert divides the experts of a network, and this one has none; use data"
    with pytest.raises(ValueError, match=words):
        check_plan(partial(GPT), (LENGTH,), meshes=[{"expert": 2}])
