"""Pipeline stages: where a graph is cut, and passes through all stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
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
    StepContext,
)
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.model.partition.stages import Stage
from pydtnn.model.stage import Pipeline, Transfer
from pydtnn.parallel import Mesh
from pydtnn.parallel.pipeline import zb_v
from pydtnn.testing import check_plan
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


def samples(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(6, *shape))


CONTEXT = StepContext(training=True, seed=1, samples=np.arange(6))


@each("stages", [2, 3, 4])
@each("several", [False, True])
def test_passes_through_all_stages_equal_those_of_the_whole_network(
    stages: int, several: bool
) -> None:
    net = TwoHeads if several else residual_net
    shape: Any = (SHAPE, SHAPE) if several else SHAPE
    x: Any = (samples(SHAPE), samples(SHAPE, 1)) if several else samples(SHAPE)
    dy: Any = (samples((4,)), samples((2,))) if several else samples((10,))

    def run(mesh: Mesh | None) -> tuple[Any, dict[str, np.ndarray]]:
        model = Model(net(), shape, dtype="float64", mesh=mesh)
        y, residuals = model.forward(x, CONTEXT)
        model.backward(dy, residuals)
        return y, {name: p.grad.copy() for name, p in model.parameters.items()}

    expected, gradients = run(None)
    results = run_threads(stages, lambda comm: run(Mesh(comm, pipeline=stages)))
    for y, _ in results:
        for ours, theirs in zip(y, expected, strict=True) if several else [(y, expected)]:
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    names = [name for _, own in results for name in own]
    assert sorted(names) == sorted(gradients)  # each in one stage only
    for _, own in results:
        for name, gradient in own.items():
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-12, atol=1e-13)


def test_predictions_are_equal_on_all_ranks() -> None:
    x = samples(SHAPE)
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


def test_stages_begin_at_the_named_layers_and_blocks() -> None:
    models = built(3, {"pipeline": ["block", "head"]})
    firsts = [model.layers[0].name for model in models]
    assert firsts == ["conv2d0", "block.body.conv2d0", "head"]
    assert models[1].pipeline.stages[0].receives[0].name == "relu2"
    assert models[0].pipeline.stages[0].sends == models[1].pipeline.stages[0].receives


def test_residual_edges_cross_a_cut_and_pass_through_stages() -> None:
    models = built(4, {"pipeline": ["block.body.relu2", "block.body.conv2d3", "block.add"]})
    sent = [[value.name for value in model.pipeline.stages[0].sends] for model in models]
    assert sent == [
        ["relu2", "block.body.batchnorm1"],
        ["relu2", "block.body.relu2"],
        ["relu2", "block.body.batchnorm4"],
        [],
    ]


def test_layers_are_fused_within_a_stage() -> None:
    models = built(2, {"pipeline": ["two"]})
    assert [type(layer).__name__ for layer in models[0].layers] == [
        *("FusedConv2d", "NormAddReLU", "FusedConv2d", "NormAddReLU", "FusedConv2d", "NormAddReLU")
    ]


def test_automatic_stages_do_not_separate_fused_layers() -> None:
    for stages in (2, 3, 4):
        for model in built(stages)[1:]:
            assert not isinstance(model.layers[0], BatchNorm | ReLU | Add)


def test_automatic_stages_minimise_the_largest() -> None:
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
def test_plans_that_cannot_be_are_refused(stages: int, plan: Any, net: Any, message: str) -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            Model(net(), SHAPE, mesh=Mesh(comm, pipeline=stages), plan=plan)

    run_threads(stages, rank)


def test_a_plan_with_stages_requires_the_axis() -> None:
    def rank(comm: Communicator) -> None:
        for plan in ("pipeline", {"pipeline": ["block"]}):
            with pytest.raises(ValueError, match="pipeline requires an axis of the mesh"):
                Model(residual_net(), SHAPE, mesh=Mesh(comm, data=2), plan=plan)

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("plan", "meshes"),
    [
        ("pipeline", [{"pipeline": 3}]),
        pytest.param("pipeline", None, marks=pytest.mark.long),
        ({"pipeline": ["block", "head"]}, None),
        (None, [{"pipeline": 2, "filter": 2}]),
        pytest.param(
            None,
            [{"data": 2, "pipeline": 2, "filter": 2}, {"pipeline": 2, "spatial": 2}],
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_stages_equal_serial_training(plan: Any, meshes: Any) -> None:
    report = check_plan(residual_net, SHAPE, plan, meshes=meshes)
    assert not any(row.refused for row in report.rows)


@each(
    ("plan", "schedule", "meshes"),
    [
        ("pipeline", "interleaved", [{"pipeline": 2}]),
        ({"pipeline": ["block.body.relu2", "block.body.conv2d3", "block.add"]}, "zb_v", None),
        (None, "zb_v", [{"pipeline": 2, "filter": 2}]),
    ],
)
def test_several_stages_per_rank_equal_serial_training(
    plan: Any, schedule: str, meshes: Any
) -> None:
    report = check_plan(residual_net, SHAPE, plan, meshes=meshes, pipeline_schedule=schedule)
    assert not any(row.refused for row in report.rows)


def test_two_directions_equal_serial_training() -> None:
    options: Any = {"pipeline_schedule": "chimera", "training": True}
    report = check_plan(residual_net, SHAPE, "pipeline", **options)
    assert [(row.mesh["pipeline"], bool(row.refused)) for row in report.rows[:3]] == [
        (2, False),
        (3, True),
        (4, False),
    ]
    plan = {"pipeline": ["block.body.relu2"]}
    report = check_plan(residual_net, SHAPE, plan, **options)
    assert not any(row.refused for row in report.rows)


def test_gradients_that_are_not_added_up_over_both_directions_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mesh, "subgroup", lambda mesh, axis, positions: Serial())
    with pytest.raises(AssertionError, match="gradient"):
        check_plan(
            residual_net,
            SHAPE,
            meshes=[{"pipeline": 2}],
            pipeline_schedule="chimera",
            training=True,
        )


def test_schedules_that_compute_gradients_of_parameters_twice_are_refused() -> None:
    def twice(rank: int, ranks: int, micro_batches: int) -> Any:
        own = zb_v(rank, ranks, micro_batches)
        return own + own[-1:]

    with pytest.raises(ValueError, match="stage 0 has backward_parameters 3 2 times; keep one"):
        check_plan(residual_net, SHAPE, meshes=[{"pipeline": 2}], pipeline_schedule=twice)


def test_gradients_that_a_stage_does_not_return_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Pipeline.send

    def broken(own: Pipeline, stage: Stage, direction: int, dx: Any, number: int = 0) -> Transfer:
        return send(own, stage, direction, 0 * dx if stage.number == 1 else dx, number)

    monkeypatch.setattr(Pipeline, "send", broken)
    with pytest.raises(AssertionError, match="gradient of the input, which is the output of relu4"):
        check_plan(residual_net, SHAPE, {"pipeline": ["two"]}, meshes=[{"pipeline": 2}])


def test_values_of_another_layer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Pipeline.send

    def swapped(own: Pipeline, stage: Stage, direction: int, y: Any, number: int = 0) -> Transfer:
        return send(own, stage, direction, y[::-1] if direction > 0 else y, number)

    monkeypatch.setattr(Pipeline, "send", swapped)
    plan = {"pipeline": ["block.body.relu2"]}
    with pytest.raises(AssertionError, match="relu2: the output is the first that differs"):
        check_plan(residual_net, SHAPE, plan, meshes=[{"pipeline": 2}])
