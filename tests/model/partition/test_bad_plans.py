"""Plans that cannot be are refused in one sentence, on every rank, before any work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import (
    Conv2d,
    Conv3d,
    Flatten,
    Linear,
    MaxPool2d,
    MaxPool3d,
    MultiHeadAttention,
    ReLU,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.model.partition import Plan
from pydtnn.parallel.mesh import Mesh
from tests.each import each


def net() -> Sequential:
    return Sequential(
        Conv2d(3, 3, padding=1, name="conv"),
        ReLU(name="relu"),
        MaxPool2d(2, name="pool"),
        Conv2d(4, 1, name="point"),
        Flatten(name="flat"),
        Linear(2, name="fc"),
    )


def refusals(plan: Any, axes: dict[str, int], shape: tuple[int, ...] = (6, 4, 2)) -> list[str]:
    """What each rank is told."""

    def rank(comm: Communicator) -> str:
        mesh = Mesh(comm, **axes)
        with pytest.raises((ValueError, TypeError)) as caught:
            Model(net(), shape, plan=plan, mesh=mesh)
        return str(caught.value)

    size = 1
    for ranks in axes.values():
        size *= ranks
    return run_threads(size, rank)


CASES: list[tuple[Any, dict[str, int], str]] = [
    ("filtr", {"filter": 2}, "^Plan: unknown strategy 'filtr'; did you mean 'filter'"),
    ("plan.txt", {"filter": 2}, "^Plan: unknown strategy 'plan.txt'.*a file must end in .yaml$"),
    ("absent.yaml", {"filter": 2}, "^Plan: file absent.yaml does not exist"),
    ("{fc: {filter: ", {"filter": 2}, "^Plan: the rules {fc: {filter:  cannot be read: .*"),
    ("spatial", {"a": 2, "b": 2}, "spatial requires one axis of the mesh besides data, got a, b"),
    (
        None,
        {"filtr": 2},
        "axis filtr of the mesh has no plan .*: unknown strategy 'filtr'; did you mean 'filter'",
    ),
    ({"conv": {"filter": "filtr"}}, {"filter": 2}, "unknown axis of the mesh 'filtr'; did you"),
    ({"conf": {"filter": "filter"}}, {"filter": 2}, "unknown layer 'conf'; did you mean 'conv'"),
    ({"conv": {"filtr": "filter"}}, {"filter": 2}, "unknown strategy 'filtr'; did you mean"),
    ({"conv": "filter"}, {"filter": 2}, "expected for conv a mapping of strategies to axes"),
    ({"conv": {"filter": 2}}, {"filter": 2}, "expected for conv the name of an axis .* got 2"),
    ({"conv": {"filter": ["a"]}}, {"filter": 2}, "expected for conv the name of an axis"),
    ([("conv", "filter")], {"filter": 2}, "Plan: "),
    (3, {"filter": 2}, "^Plan: unknown strategy '3'"),
    (
        {"conv": {"filter": "a", "spatial": "a"}},
        {"a": 2},
        "conv has two strategies along one axis; use two axes",
    ),
    (
        {"relu": {"filter": "a"}},
        {"a": 2},
        "relu: ReLU cannot be partitioned by filter; strategies are none",
    ),
    (
        {"fc": {"spatial": "a"}},
        {"a": 2},
        "fc: Linear cannot be partitioned by spatial; strategies are filter, channel, alternate",
    ),
    (
        {"pool": {"filter": "a"}},
        {"a": 2},
        "pool: MaxPool2d cannot be partitioned by filter; strategies are spatial, width, data",
    ),
    (
        {"conv": {"filter": "a"}},
        {"a": 4},
        "conv: cannot be partitioned along the axis a=4: filters must be at least the 4 ranks, "
        "got 3; use fewer ranks",
    ),
    (
        {"conv": {"channel": "a"}},
        {"a": 3},
        "conv: .* a=3: input channels must be at least the 3 ranks, got 2",
    ),
    (
        {"point": {"spatial": "a"}},
        {"a": 4},
        "point: .* a=4: the height of the input must be at least the 4 ranks, got 3",
    ),
    (
        {"conv": {"filter": "a", "channel": "b"}, "point": {"filter": "b", "channel": "a"}},
        {"a": 4, "b": 1},
        "conv: .* a=4: filters must be",
    ),
    ("width", {"width": 5}, "the width of the input must be at least the 5 ranks, got 4"),
]


@each(("plan", "axes", "words"), CASES)
def test_a_plan_that_cannot_be_is_refused_on_every_rank(
    plan: Any, axes: dict[str, int], words: str
) -> None:
    told = refusals(plan, axes)
    assert len({*told}) == 1
    assert re.search(words, told[0]), told[0]
    assert "\n" not in told[0]


@each(
    ("text", "words"),
    [
        ("conv: {filter: a", "plan.yaml cannot be read"),
        ("conv: &x {filter: a}\nfc: *x", "plan.yaml cannot be read: .*aliases"),
        ("", "expected a mapping of layers to strategies, got None"),
        ("- conv", "expected a mapping of layers to strategies, got"),
        ("conv: [filter, a]", "expected for conv a mapping of strategies"),
        ("conv: {filter: b}", "unknown axis of the mesh 'b'"),
    ],
)
def test_a_malformed_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    told = refusals(str(path), {"a": 2})
    assert re.search(words, told[0]), told[0]
    assert "\n" not in told[0]


def test_a_file_and_a_mapping_are_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("conv: {spatial: a}\n'*': {filter: a}\n")
    rules = {"conv": {"spatial": "a"}, "*": {"filter": "a"}}

    def rank(comm: Communicator) -> bool:
        mesh = Mesh(comm, a=2)
        text = "{conv: {spatial: a}, '*': {filter: a}}"
        plans: list[Any] = [path, str(path), rules, Plan(rules), text]
        models = [Model(net(), (6, 4, 2), plan=plan, mesh=mesh) for plan in plans]
        names = [[node.name for node in model.graph.nodes] for model in models]
        return all(own == names[0] for own in names)

    assert all(run_threads(2, rank))


def test_a_plan_requires_a_mesh() -> None:
    with pytest.raises(ValueError, match=r"Model: a plan requires the ranks; use mesh=Mesh\(comm"):
        Model(net(), (6, 4, 2), plan="filter")


def test_a_plan_that_cuts_nothing_is_refused() -> None:
    (told, _) = refusals({"*": {}}, {"a": 2})
    assert told.startswith("Plan: no layer is cut along the axis a=2; give a plan with layers")


def test_attention_has_no_strategy_of_its_own() -> None:
    def rank(comm: Communicator) -> None:
        net = MultiHeadAttention(2, name="a")
        plan = {"a.attention": {"filter": "filter"}, "*": {"filter": "filter"}}
        with pytest.raises(
            ValueError, match="a.attention: DotProductAttention cannot be partitioned by filter; "
        ):
            Model(net, (3, 4), plan=plan, mesh=Mesh(comm, filter=2))

    run_threads(2, rank)


@each(
    ("plan", "words"),
    [
        (
            {"conv": {"spatial": "a"}},
            "conv: Conv3d cannot be partitioned by spatial; strategies are filter, channel, alt",
        ),
        (
            {"pool": {"width": "a"}},
            "pool: MaxPool3d cannot be partitioned by width; strategies are data$",
        ),
        ("spatial", "no layer is cut along the axis a=2; give a plan with layers that can be"),
    ],
)
def test_stripes_of_volumes_are_refused(plan: Any, words: str) -> None:
    def rank(comm: Communicator) -> str:
        volumes = Sequential(Conv3d(3, 2, name="conv"), MaxPool3d(2, name="pool"))
        with pytest.raises(ValueError, match=f"^Plan: {words}") as caught:
            Model(volumes, (5, 5, 5, 2), plan=plan, mesh=Mesh(comm, a=2))
        return str(caught.value)

    told = run_threads(2, rank)
    assert told[0] == told[1]
    assert "\n" not in told[0]
