"""Networks under plans compute what serial training does; tests/fuzz draws others of both."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.tools.testing import check_plan
from tests.model.networks import IMAGE, NETS

Axes = dict[str, int]


def tall() -> Sequential:
    """Convolutions of stripes that are much taller than their halos."""
    body = (Conv2d(4, 5, padding=2), BatchNorm(), ReLU(), Conv2d(4, 3, padding=1))
    first = (Conv2d(4, 3, padding=1), BatchNorm(), ReLU(), Residual(Sequential(*body)), ReLU())
    second = (Conv2d(6, 3, stride=2, padding=1), BatchNorm(), ReLU())
    last = Conv2d(4, (3, 1), padding=((1, 0), (0, 0)))
    return Sequential(*first, *second, last, GlobalAvgPool2d(), Linear(5))


FIRST_STRIPES = {"*conv2d0": {"spatial": "model"}}
CASES: list[tuple[str, Any, Axes]] = [
    ("projection", "filter", {"filter": 3}),
    ("projection", "channel", {"data": 2, "channel": 2}),
    ("projection", FIRST_STRIPES | {"*": {"data": "model"}}, {"model": 3}),
    ("projection", "spatial", {"spatial": 2}),
    ("projection", None, {"filter": 2, "channel": 2}),
    ("pooled branches", "alternate", {"data": 2, "alternate": 2}),
    ("pooled branches", "data", {"model": 2}),
    ("pooled branches", None, {"spatial": 2, "width": 2}),
    ("pooled branches", None, {"spatial": 2, "filter": 2}),
    ("pooled branches", FIRST_STRIPES | {"*": {"alternate": "model"}}, {"model": 2}),
    ("dense", "alternate", {"alternate": 3}),
    ("dense", "width", {"width": 3}),
    ("shared", "data", {"model": 2}),
    ("tall", "spatial", {"spatial": 2}),
    ("tall", "channel", {"channel": 4}),
]


def name_of(value: Any) -> str | None:
    if isinstance(value, dict):
        return "x".join(f"{key}{n}" for key, n in value.items() if isinstance(n, int)) or "stripes"
    return None


@pytest.mark.few(2)
@pytest.mark.parametrize(("network", "plan", "mesh"), CASES, ids=name_of)
def test_a_plan_equals_serial_training(network, plan, mesh):
    net, shape = (tall, (83, 5, 2)) if network == "tall" else (NETS[network], IMAGE)
    check_plan(net, shape, plan, meshes=[mesh], batch=3)


@pytest.mark.mpi(2)
def test_a_plan_equals_serial_training_on_mpi(comm):
    check_plan(NETS["projection"], IMAGE, "spatial", comm=comm, batch=3)


def shared() -> Sequential:
    """Layers used several times, for maps of several heights."""
    conv, norm = Conv2d(4, 3, padding=1, name="conv"), BatchNorm(name="norm")
    once = [conv, norm, ReLU()]
    again = [conv, norm, ReLU()]
    return Sequential(Conv2d(4, 1), *once, MaxPool2d(3), *again, Flatten(), Linear(3, name="fc"))


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ({"conv": {"filter": "a"}, "*": {"spatial": "a"}}, {"a": 2}),
        ({"conv_1": {"filter": "a"}, "*": {"data": "a"}}, {"data": 2, "a": 2}),
    ],
    ids=name_of,
)
def test_all_uses_of_a_layer_are_cut_in_the_same_way(plan, mesh):
    check_plan(shared, (9, 7, 2), plan, meshes=[mesh], batch=3)


def test_a_use_that_cannot_be_cut_like_the_first_is_refused():
    with pytest.raises(ValueError, match=r"^conv_1: .* it cannot be cut like conv, whose param"):
        check_plan(shared, (9, 7, 2), "spatial", meshes=[{"spatial": 4}])


def test_axes_of_the_mesh_may_exchange_what_they_cut():
    def net() -> list[Conv2d]:
        return [Conv2d(3, 3, padding=1, name=name) for name in ("one", "two", "three")]

    plan = {
        "one": {"data": "a", "width": "b"},
        "two": {"width": "a", "spatial": "b"},
        "three": {"spatial": "a", "width": "b"},
    }
    check_plan(net, (5, 6, 2), plan, meshes=[{"a": 2, "b": 2}], batch=3)
