"""Pipeline stages: where a graph is cut, and passes through all stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.checks import MAX_TAG
from pydtnn.layers import (
    Add,
    BatchNorm,
    Block,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    Net,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.layers.node import Node
from pydtnn.model import Model, stage
from pydtnn.model.partition.stages import message_bytes
from pydtnn.model.pipeline import zb_v
from pydtnn.parallel import Mesh, mesh
from pydtnn.tools.testing import check_plan
from tests.each import each

SHAPE = (7, 5, 2)


def conv(filters: int, **options: Any) -> Conv2d:
    return Conv2d(filters, 3, padding=1, **options)


class TwoHeads(Block):
    """The first output is computed early, and the second from both inputs."""

    def wire(self, graph: Any, *inputs: Node) -> tuple[Node, ...]:
        x = graph.add(conv(3), inputs[0])
        early = graph.add(Sequential(GlobalAvgPool2d(), Linear(4)), x, label="early")
        y = graph.add(Sequential(conv(4), ReLU(), Dropout(0.3), conv(3)), x, label="body")
        y = graph.add(Add(), y, graph.add(conv(3), inputs[1]))
        return early, graph.add(Sequential(Flatten(), Linear(2)), y, label="late")


def residual_net() -> Net:
    body = Sequential(conv(4), BatchNorm(), ReLU(), conv(4), BatchNorm())
    return Sequential(
        conv(4, bias=False),
        BatchNorm(),
        ReLU(),
        Residual(body, name="block"),
        ReLU(),
        Branches(conv(3), Conv2d(2, 1), merge=Concat(), name="two"),
        ReLU(),
        Flatten(),
        Linear(10, name="head"),
    )


def test_predictions_are_equal_on_all_ranks():
    x = np.random.default_rng(0).normal(size=(6, *SHAPE))
    expected = Model(residual_net(), SHAPE, dtype="float64").predict(x, batch_size=4)

    def rank(comm: Communicator) -> np.ndarray:
        model = Model(residual_net(), SHAPE, dtype="float64", mesh=Mesh(comm, pipeline=3))
        return model.predict(x, batch_size=4)

    for y in run_threads(3, rank):
        np.testing.assert_allclose(y, expected, rtol=1e-12)


def built(stages: int, plan: Any = None, net: Any = residual_net, **options: Any) -> list[Model]:
    def rank(comm: Communicator) -> Model:
        return Model(net(), SHAPE, mesh=Mesh(comm, pipeline=stages), plan=plan, **options)

    return run_threads(stages, rank)


def test_stages_begin_at_the_named_layers_and_blocks():
    models = built(3, {"pipeline": ["block", "head"]})
    firsts = [model.layers[0].name for model in models]
    assert firsts == ["conv2d0", "block.body.conv2d0", "head"]
    assert models[1].pipeline.stages[0].receives[0].name == "relu2"
    assert models[0].pipeline.stages[0].sends == models[1].pipeline.stages[0].receives


def test_residual_edges_cross_a_cut_and_pass_through_stages():
    models = built(4, {"pipeline": ["block.body.relu2", "block.body.conv2d3", "block.add"]})
    sent = [[value.name for value in model.pipeline.stages[0].sends] for model in models]
    assert sent == [
        ["relu2", "block.body.batchnorm1"],
        ["relu2", "block.body.relu2"],
        ["relu2", "block.body.batchnorm4"],
        [],
    ]


def test_automatic_stages_do_not_separate_fused_layers():
    for stages in (2, 3, 4):
        for model in built(stages)[1:]:
            assert not isinstance(model.layers[0], BatchNorm | ReLU | Add)


def test_automatic_stages_minimise_the_largest():
    def net() -> Net:
        return Sequential(*(Linear(width) for width in (64, 64, 64, 256, 64, 64)))

    def rank(comm: Communicator) -> list[str]:
        model = Model(net(), (64,), mesh=Mesh(comm, pipeline=3))
        return [layer.name for layer in model.layers]

    # 4096, 4096, 4096, 16384, 16384, 4096 products
    assert run_threads(3, rank) == [
        ["linear0", "linear1", "linear2"],
        ["linear3"],
        ["linear4", "linear5"],
    ]


def test_messages_are_the_arrays_that_cross_a_boundary():
    graph = Model(Sequential(Linear(7), Residual(Linear(7)), Linear(2)), (5,)).graph
    sizes = [message_bytes(graph.nodes, graph.outputs, start) for start in range(2, 5)]
    assert sizes == [4 * 7, 4 * (7 + 7), 4 * 7]


def test_messages_between_stages_have_other_tags_than_those_of_layers():
    assert mesh.FIRST_TAG + mesh.TAGS <= stage.FIRST_TAG
    assert stage.FIRST_TAG + stage.TAGS <= MAX_TAG + 1


class Twice(Block):
    """The same layer at the beginning and at the end."""

    def wire(self, graph: Any, *inputs: Node) -> Node:
        layer = conv(2, name="shared")
        x = graph.add(Sequential(layer, ReLU()), *inputs)
        return graph.add(Sequential(conv(3), conv(2, name="after"), layer, Flatten()), x, label="b")


@each(
    ("stages", "plan", "net", "message"),
    [
        (12, None, lambda: Sequential(Flatten(), Linear(3)), "expected at most 2 stages for a"),
        (3, {"pipeline": ["block"]}, residual_net, "first layers of 2 further stages for 3 stages"),
        (2, {"pipeline": ["blok"]}, residual_net, "unknown layer 'blok'; did you mean 'block'"),
        (3, {"pipeline": ["head", "block"]}, residual_net, "where block is not after the begin"),
        (2, {"pipeline": ["conv2d0"]}, residual_net, "conv2d0 is not after the beginning"),
        (2, {"pipeline": ["b.after"]}, Twice, "shared in stage 0 and its other use b.shared.* 1"),
        (3, None, Twice, "expected at most 2 stages .*, some of which share parameters, got 3"),
    ],
)
def test_plans_that_cannot_be_are_refused(stages, plan, net, message):
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            Model(net(), SHAPE, mesh=Mesh(comm, pipeline=stages), plan=plan)

    run_threads(stages, rank)


def test_a_plan_with_stages_requires_the_axis():
    def rank(comm: Communicator) -> None:
        for plan in ("pipeline", {"pipeline": ["block"]}):
            with pytest.raises(ValueError, match="pipeline requires an axis of the mesh"):
                Model(residual_net(), SHAPE, mesh=Mesh(comm, data=2), plan=plan)

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("plan", "meshes"),
    [
        ("pipeline", [{"pipeline": 3}]),
        ({"pipeline": ["block", "head"]}, None),
        (None, [{"pipeline": 2, "filter": 2}]),
    ],
    ids=str,
)
def test_stages_equal_serial_training(plan, meshes):
    report = check_plan(residual_net, SHAPE, plan, meshes=meshes)
    assert not any(row.refused for row in report.rows)


@each("stages", [2, 4])
def test_stages_of_a_network_of_several_inputs_and_outputs_equal_serial_training(stages):
    check_plan(TwoHeads, (SHAPE, SHAPE), "pipeline", meshes=[{"pipeline": stages}], batch=3)


@each(
    ("plan", "schedule", "meshes"),
    [
        ("pipeline", "interleaved", [{"pipeline": 2}]),
        ({"pipeline": ["block.body.relu2", "block.body.conv2d3", "block.add"]}, "zb_v", None),
        ("spatial", "zb_v", [{"pipeline": 2, "spatial": 2}]),
    ],
    few=2,
)
def test_several_stages_per_rank_equal_serial_training(plan, schedule, meshes):
    report = check_plan(residual_net, SHAPE, plan, meshes=meshes, pipeline_schedule=schedule)
    assert not any(row.refused for row in report.rows)


@each("plan", ["pipeline", {"pipeline": ["block.body.relu2"]}])
def test_two_directions_equal_serial_training(plan):
    mesh = [{"pipeline": 2}]
    (row,) = check_plan(residual_net, SHAPE, plan, meshes=mesh, pipeline_schedule="chimera").rows
    assert not row.refused


def test_schedules_that_compute_gradients_of_parameters_twice_are_refused():
    def twice(rank: int, ranks: int, micro_batches: int) -> Any:
        own = zb_v(rank, ranks, micro_batches)
        return own + own[-1:]

    with pytest.raises(ValueError, match="stage 0 has backward_parameters 3 2 times; keep one"):
        check_plan(residual_net, SHAPE, meshes=[{"pipeline": 2}], pipeline_schedule=twice)
