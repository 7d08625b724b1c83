"""Networks under plans compute what serial training does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pydtnn.comm import Communicator
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from pydtnn.testing import check_plan
from tests.model.partition.networks import ALL, NETWORKS, WIDE

FIRST_STRIPES = {
    "resnet20": {"stem": {"spatial": "model"}, "stage1": {"spatial": "model"}},
    "vgg11": {"stage[12]_*": {"spatial": "model"}},
    "windows": {"conv[12]": {"spatial": "model"}},
    "tall": {"conv1": {"spatial": "model"}},
    "concat": {"stem": {"spatial": "model"}, "inception": {"spatial": "model"}},
}
"""The layers that are cut into stripes in a plan that changes along the network."""


def changing(network: str, later: str) -> dict[str, dict[str, str]]:
    return FIRST_STRIPES[network] | {"*": {later: "model"}}


Axes = dict[str, int]
STRATEGIES = ("filter", "channel", "alternate", "spatial", "width", "data")

ONE_AXIS: list[tuple[str, str, Axes]] = [
    (network, strategy, {"model" if strategy == "data" else strategy: ranks})
    for network in NETWORKS
    for strategy in STRATEGIES
    for ranks in (2, 3, 4)
]

HYBRIDS: list[tuple[str, Any, Axes]] = [
    *(
        (network, plan, {"data": 2, plan: 2})
        for network in NETWORKS
        for plan in ("filter", "channel", "alternate", "spatial", "width")
    ),
    *((network, None, {"spatial": 2, "width": 2}) for network in NETWORKS),
    *((network, None, {"spatial": 2, "filter": 2}) for network in NETWORKS),
    *((network, None, {"filter": 2, "channel": 2}) for network in NETWORKS),
    *(
        (network, changing(network, later), mesh)
        for network in NETWORKS
        for later in ("data", "alternate")
        for mesh in ({"model": 2}, {"model": 3}, {"data": 2, "model": 2})
    ),
]


def name_of(value: Any) -> str | None:
    if isinstance(value, dict) and all(isinstance(n, int) for n in value.values()):
        return "x".join(f"{axis}{n}" for axis, n in value.items())
    if isinstance(value, Mapping):
        return "stripes-" + next(iter(value["*"]))
    return None


def check(network: str, plan: Any, mesh: Axes, **options: Any) -> None:
    net, shape = ALL[network]
    check_plan(net, shape, plan, meshes=[mesh], batch=3, **options)


QUICK = [
    ("windows", "filter", {"filter": 3}),
    ("windows", "channel", {"data": 2, "channel": 2}),
    ("concat", "alternate", {"alternate": 3}),
    ("concat", "data", {"model": 2}),
    ("concat", None, {"spatial": 2, "width": 2}),
    ("windows", changing("windows", "data"), {"data": 2, "model": 2}),
    ("resnet8", "spatial", {"spatial": 3}),
    ("tall", "spatial", {"spatial": 2}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("network", "plan", "mesh"), QUICK, ids=name_of)
def test_a_plan_equals_serial_training(network: str, plan: Any, mesh: Axes) -> None:
    check(network, plan, mesh)


def _marked(network: str, plan: Any, mesh: Axes) -> Any:
    """Cases of small networks are run by `make test-all`, the others on request."""
    marks = pytest.mark
    small = network in ("windows", "concat") and 4 not in mesh.values()
    return pytest.param(network, plan, mesh, marks=[marks.long if small else marks.matrix])


@pytest.mark.parametrize(
    ("network", "plan", "mesh"),
    [_marked(*case) for case in (*ONE_AXIS, *HYBRIDS) if case not in QUICK],
    ids=name_of,
)
def test_every_plan_equals_serial_training(network: str, plan: Any, mesh: Axes) -> None:
    check(network, plan, mesh)


@pytest.mark.mpi(2)
def test_a_plan_equals_serial_training_on_mpi(comm: Communicator) -> None:
    check_plan(*ALL["resnet8"], "spatial", comm=comm, batch=3)


@pytest.mark.matrix
@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("plan", STRATEGIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_every_plan_equals_serial_training_on_mpi(
    comm: Communicator, network: str, plan: str
) -> None:
    check_plan(*NETWORKS[network], plan, comm=comm, batch=3)


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["filter", "spatial"])
def test_a_wide_network_equals_serial_training(plan: str) -> None:
    check_plan(*WIDE, plan, meshes=[{plan: 2}], batch=2)


def shared() -> Sequential:
    """Layers used several times, for maps of several heights."""
    conv, norm = Conv2d(4, 3, padding=1, name="conv"), BatchNorm(name="norm")
    once = [conv, norm, ReLU()]
    again = [conv, norm, ReLU()]
    return Sequential(Conv2d(4, 1), *once, MaxPool2d(3), *again, Flatten(), Linear(3, name="fc"))


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("spatial", {"spatial": 2}),
        ({"conv": {"filter": "a"}, "*": {"spatial": "a"}}, {"a": 2}),
        ({"conv_1": {"filter": "a"}, "*": {"data": "a"}}, {"data": 2, "a": 2}),
    ],
    ids=name_of,
)
def test_all_uses_of_a_layer_are_cut_in_the_same_way(plan: Any, mesh: Axes) -> None:
    check_plan(shared, (9, 7, 2), plan, meshes=[mesh], batch=3)


def test_a_use_that_cannot_be_cut_like_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^conv_1: .* it cannot be cut like conv, whose param"):
        check_plan(shared, (9, 7, 2), "spatial", meshes=[{"spatial": 4}])


def test_axes_of_the_mesh_may_exchange_what_they_cut() -> None:
    def net() -> list[Conv2d]:
        return [Conv2d(3, 3, padding=1, name=name) for name in ("one", "two", "three")]

    plan = {
        "one": {"data": "a", "width": "b"},
        "two": {"width": "a", "spatial": "b"},
        "three": {"spatial": "a", "width": "b"},
    }
    check_plan(net, (5, 6, 2), plan, meshes=[{"a": 2, "b": 2}], batch=3)
