"""Plans that cannot be are refused in one sentence, on every rank, before any work."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import Conv2d, Conv3d, Flatten, Linear, MaxPool2d, MaxPool3d, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.model.partition import Plan
from pydtnn.parallel.mesh import Mesh
from tests.each import each


def images() -> Sequential:
    conv = Conv2d(3, 3, padding=1, name="conv")
    pool = (ReLU(name="relu"), MaxPool2d(2, name="pool"), Conv2d(4, 1, name="point"))
    return Sequential(conv, *pool, Flatten(name="flat"), Linear(2, name="fc"))


def volumes() -> Sequential:
    return Sequential(Conv3d(3, 2, name="conv"), MaxPool3d(2, name="pool"))


SHAPES = {images: (6, 4, 2), volumes: (5, 5, 5, 2)}


def refusal(plan: Any, axes: dict[str, int], net: Any = images) -> str:
    """The sentence, which is the same on each rank."""

    def rank(comm: Communicator) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            Model(net(), SHAPES[net], plan=plan, mesh=Mesh(comm, **axes))
        return str(caught.value)

    told = {*run_threads(prod(axes.values()), rank)}
    assert len(told) == 1
    assert "\n" not in min(told)
    return told.pop()


CASES: list[tuple[Any, dict[str, int], str]] = [
    ("filtr", {"filter": 2}, "^Plan: unknown strategy 'filtr'; did you mean 'filter'"),
    ("plan.txt", {"filter": 2}, "^Plan: unknown strategy .*a file must end in .yaml$"),
    ("absent.yaml", {"filter": 2}, "^Plan: file absent.yaml does not exist"),
    ("{fc: {filter: ", {"filter": 2}, "^Plan: the rules {fc: {filter:  cannot be read"),
    ("spatial", {"a": 2, "b": 2}, "requires one axis of the mesh besides data, got a, b"),
    (None, {"filtr": 2}, "axis filtr of the mesh has no plan .* did you mean 'filter'"),
    ({"conv": {"filter": "filtr"}}, {"filter": 2}, "unknown axis of the mesh 'filtr'"),
    ({"conf": {"filter": "filter"}}, {"filter": 2}, "unknown layer 'conf'; .*'conv'"),
    ({"conv": {"filtr": "filter"}}, {"filter": 2}, "unknown strategy 'filtr'"),
    ({"conv": "filter"}, {"filter": 2}, "expected for conv a mapping of strategies to axes"),
    ({"conv": {"filter": 2}}, {"filter": 2}, "for conv the name of an axis .* got 2"),
    ({"conv": {"filter": ["a"]}}, {"filter": 2}, "expected for conv the name of an axis"),
    ([("conv", "filter")], {"filter": 2}, "Plan: "),
    (3, {"filter": 2}, "^Plan: unknown strategy '3'"),
    ({"conv": {"filter": "a", "spatial": "a"}}, {"a": 2}, "two strategies along one axis"),
    ({"relu": {"filter": "a"}}, {"a": 2}, "ReLU cannot be partitioned by filter; .* none"),
    ({"fc": {"spatial": "a"}}, {"a": 2}, "strategies are filter, channel, alternate"),
    ({"pool": {"filter": "a"}}, {"a": 2}, "strategies are spatial, width, data"),
    ({"conv": {"filter": "a"}}, {"a": 4}, "conv: .* a=4: filters must be at least .* got 3;"),
    ({"conv": {"channel": "a"}}, {"a": 3}, "conv: .* a=3: input channels .* got 2"),
    ({"point": {"spatial": "a"}}, {"a": 4}, "point: .* the height of the input .* got 3"),
    ("width", {"width": 5}, "the width of the input must be at least the 5 ranks, got 4"),
    *(
        (text, {"a": 2}, words)
        for text, words in (
            ("{conv: &x {filter: a}, fc: *x}", "cannot be read: .*aliases"),
            ("{conv: [filter, a]}", "expected for conv a mapping of strategies"),
        )
    ),
    ({"*": {}}, {"a": 2}, "^Plan: no layer is cut along the axis a=2; give a plan with layers"),
]


@each(("plan", "axes", "words"), CASES)
def test_a_plan_that_cannot_be_is_refused_on_every_rank(plan, axes, words):
    told = refusal(plan, axes)
    assert re.search(words, told), told


@each(
    ("plan", "words"),
    [
        ({"conv": {"spatial": "a"}}, "^Plan: conv: Conv3d .* strategies are filter, channel, alt"),
        ({"pool": {"width": "a"}}, "^Plan: pool: MaxPool3d .* strategies are data$"),
        ("spatial", "^Plan: no layer is cut along the axis a=2; give a plan"),
    ],
)
def test_stripes_of_volumes_are_refused(plan, words):
    told = refusal(plan, {"a": 2}, volumes)
    assert re.search(words, told), told


def test_a_file_and_a_mapping_are_the_same_plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("conv: {spatial: a}\n'*': {filter: a}\n")
    rules = {"conv": {"spatial": "a"}, "*": {"filter": "a"}}

    def rank(comm: Communicator) -> bool:
        mesh = Mesh(comm, a=2)
        text = "{conv: {spatial: a}, '*': {filter: a}}"
        plans: list[Any] = [path, str(path), rules, Plan(rules), text]
        models = [Model(images(), (6, 4, 2), plan=plan, mesh=mesh) for plan in plans]
        names = [[node.name for node in model.graph.nodes] for model in models]
        return all(own == names[0] for own in names)

    assert all(run_threads(2, rank))
    for text, words in (("conv: {filter: a", "plan.yaml cannot be read"), ("", "got None")):
        path.write_text(text)
        assert words in refusal(str(path), {"a": 2})


def test_a_plan_requires_a_mesh():
    with pytest.raises(ValueError, match=r"Model: a plan requires the ranks; use mesh=Mesh\(comm"):
        Model(images(), (6, 4, 2), plan="filter")
