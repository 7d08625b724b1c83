from __future__ import annotations

import contextlib
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pydtnn import Model, Trainer, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import (
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.layers.parameters import Cut
from pydtnn.models import create_net
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.perfmodel.messages import MessageCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.search import SCHEDULES, search
from pydtnn.tools.perfmodel.search.layouts import AXIS, LayerOptions, Spread
from pydtnn.tools.perfmodel.search.plans import meshes, plans_for, uniform
from pydtnn.training.workload import SHARDED, Workload
from tests.each import each
from tests.tools.perfmodel.costs import PerFlop


def small() -> Sequential:
    """Large maps with few weights, then many weights."""
    return Sequential(
        Conv2d(8, 3, padding=1, name="conv1"),
        ReLU(),
        Residual(Conv2d(8, 3, padding=1, name="conv2"), BatchNorm()),
        MaxPool2d(2),
        Flatten(),
        Linear(512, name="fc1"),
        ReLU(),
        Linear(10, name="fc2"),
    )


def projector(net, shape, batch, platform="cpu-1gbit", **more) -> Projector:
    work = Workload(net, shape, batch=batch, **more)
    return Projector(work, Platform.load(platform), PerFlop())


@pytest.fixture(scope="module")
def found():
    return search(projector(small(), (16, 16, 3), 32), 4)


def test_layers_with_many_weights_are_cut_and_those_with_maps_are_not(found):
    """On a slow network, gradients of the linear layer take longer than its activations."""
    rules = found.best.work.plan
    assert rules is not None
    assert found.gain > 1.1
    assert found.prefer_uniform(1.01 * found.gain).best == found.uniform
    assert found.prefer_uniform(found.gain) == found
    assert "filter" in rules["fc1"] or "channel" in rules["fc1"]
    assert "data" in rules["conv1"] or "spatial" in rules["conv1"]


def test_the_plan_that_was_found_trains_like_one_rank(found):
    work = found.best.work
    x = np.random.default_rng(0).standard_normal((8, 16, 16, 3))
    data_set = ArrayDataset(x, np.arange(8) % 10)

    def train(comm=None) -> np.ndarray:
        mesh = None if comm is None else Mesh(comm, **work.axes)
        plan = None if comm is None else work.plan
        model = Model(small(), (16, 16, 3), dtype="float64", mesh=mesh, plan=plan)
        trainer = Trainer(model, "sgd", metrics=(), progress=False)
        data = 1 if mesh is None else mesh.shape["data"]
        trainer.fit(data_set, epochs=1, batch_size=8 // data)
        return np.array(trainer.losses)

    serial = train()
    for losses in run_threads(4, train):
        np.testing.assert_allclose(losses, serial, rtol=1e-10)


BRANCHES = Sequential(
    Branches(Conv2d(8, 1), Sequential(Conv2d(2, 1), Conv2d(4, 5, padding=2)), merge=Concat()),
    GlobalAvgPool2d(),
    Linear(10),
)


@each("platform", ["cpu-1gbit", "cpu-100gbit"], few=3)
@each("net", [small(), create_net("resnet20", 10, (16, 16, 3)), BRANCHES])
def test_by_the_model_the_result_is_never_slower_than_a_uniform_plan(net, platform):
    own = projector(net, (16, 16, 3), 16, platform)
    best = search(own, 2).best
    for axes in uniform(2, 16):
        with contextlib.suppress(ValueError):  # cannot be cut in this way
            assert best.seconds <= own.project(replace(own.work, axes=axes)).seconds


def test_many_experts_are_divided_rather_than_their_gradients_summed():
    def found(experts):
        more = {"classes": 64, "model_options": {"experts": experts}}
        return search(projector("moe_gpt_nano", (32,), 16, **more), 4).best.work.axes

    assert found(2) == {"data": 4}
    assert found(16) == {"data": 1, "expert": 4}


def test_a_limit_of_memory_is_respected():
    own = projector(small(), (16, 16, 3), 32, "cpu-200gbit")
    free = search(own, 4)
    sizes = sorted(one.memory.total for one in free.tried)
    limit = (sizes[0] + free.best.memory.total) / 2
    assert limit < free.best.memory.total
    found = search(own, 4, memory_limit=limit)
    assert found.best.memory.total <= limit
    assert found.best.seconds >= free.best.seconds
    with pytest.raises(ValueError, match="search: expected a memory limit of at least"):
        search(own, 4, memory_limit=1e3)
    with pytest.raises(ValueError, match="expected a network that can be cut over 64 ranks"):
        search(projector(Sequential(Flatten(), Linear(2)), (3,), 2), 64)


def test_parameters_are_divided_where_recomputation_is_not_enough():
    """Almost all memory is that of parameters, gradients and slots."""
    net = Sequential(*(Linear(512, name=f"fc{i}") for i in range(4)))
    own = projector(net, (512,), 8)
    works = [replace(own.work, axes={"data": 4})]
    whole = search(own, 4, works, memory_limit=inf).tried
    assert [one.work.scheme for one in whole] == ["allreduce"]
    work = replace(works[0], scheme="sharded_parameters")
    least = own.project(work).memory.total
    found = search(own, 4, works, memory_limit=1.01 * least)
    assert {one.work.scheme for one in found.tried} == {"allreduce", *SHARDED}
    assert found.best.work == work
    assert least < 0.9 * whole[0].memory.total


def test_a_rank_computes_its_samples():
    own = projector(small(), (16, 16, 3), 32)
    work = replace(own.work, axes={"data": 1, AXIS: 4})
    options = LayerOptions(own, MessageCosts(own.platform, work))
    options.exposed = 0.0
    found = {one.name: one.seconds for one in options(1, ((Spread.WHOLE, frozenset()),))}
    calls = 2 * PerFlop().call
    assert found["data"] - calls == pytest.approx((found[""] - calls) / 4)


@each(("ranks", "rows"), [(2, 1), (4, 2)])
def test_a_stripe_receives_the_rows_of_its_windows(ranks, rows):
    """Of 6 columns, 4 channels and 5 samples; inner stripes receive them from two ranks."""
    axes, net = {"data": 1, AXIS: ranks}, MaxPool2d(3, 1, padding=1)
    work = Workload(net, (8, 6, 4), batch=5, axes=axes)
    own = Projector(work, Platform.load("cpu-1gbit"), PerFlop(0.0, inf))
    options = LayerOptions(own, MessageCosts(own.platform, work))
    cut = Cut(0, AXIS, tuple(range(0, 9, 8 // ranks)))
    found = {one.name: one.seconds for one in options(1, ((cut, frozenset()),))}
    nbytes = rows * 6 * 4 * 5 * 4
    assert found["spatial"] == pytest.approx(2 * options._messages(nbytes, rows))


def test_networks_that_use_a_layer_twice_have_uniform_plans_only():
    shared = Conv2d(3, 3, padding=1)
    net = Sequential(shared, ReLU(), shared, Flatten(), Linear(10))
    own = projector(net, (8, 8, 3), 8)
    assert plans_for(own, {"data": 1, AXIS: 2}) == []
    assert search(own, 2).best.work.plan is None


def test_meshes_are_all_factorisations_with_samples_for_each_group():
    assert [*meshes(8, 64)] == [
        {"data": 1, "model": 8},
        {"data": 2, "model": 4},
        {"data": 4, "model": 2},
    ]
    assert [*meshes(8, 2)] == [{"data": 1, "model": 8}, {"data": 2, "model": 4}]


def test_pipelines_are_tried_with_each_schedule():
    net = Sequential(*(Linear(512, name=f"fc{i}") for i in range(8)))
    own = projector(net, (512,), 4096, micro_batches=8)
    tried = search(own, 4, schedules=SCHEDULES).tried
    times = {one.work.pipeline_schedule: one.seconds for one in tried if one.work.stages == 4}
    assert {*times} == {*SCHEDULES}
    assert {one.work.pipeline_schedule for one in tried if one.work.stages == 1} == {"1f1b"}
    assert times["zb_v"] < times["interleaved:2"] < times["1f1b"]
    works = [replace(own.work, axes={"pipeline": 4})]
    (best, *_) = search(own, 4, works, schedules=SCHEDULES).tried
    assert best.work.pipeline_schedule == min(times, key=times.__getitem__)
