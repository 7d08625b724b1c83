"""Layers of one's own under a plan: whole arrays, a rule of their own, or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import Communicating, Conv2d, Flatten, Layer, Linear, Net, Sequential
from pydtnn.layers.collectives import Sum
from pydtnn.layers.parameters import Cut
from pydtnn.model import Model
from pydtnn.model.execution import run_together
from pydtnn.model.partition import PlanError
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing import check_plan
from tests.each import each

SHAPE = (6, 5, 2)


class Centred(Communicating, Layer):
    """x minus the mean of a map, written for stripes, without a rule for plans."""

    def forward(self, x: Any, context: Any) -> Any:
        return x - x.mean(axis=(1, 2), keepdims=True), None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy - dy.mean(axis=(1, 2), keepdims=True)

    def forward_steps(self, *xs: Any, context: Any, joint: bool) -> Any:
        return (yield from self._centre(*xs)), None

    def backward_steps(self, dy: Any, saved: Any, *, joint: bool) -> Any:
        return (yield from self._centre(dy))

    def _centre(self, x: Any) -> Any:
        own = np.append(x.sum(axis=(1, 2)).ravel(), float(x[0, ..., 0].size))
        *sums, count = (yield Sum(own, ("spatial",))).wait()
        return x - np.reshape(sums, (len(x), 1, 1, -1)) / count


class OnStripes(Centred):
    """The same with a rule."""

    def follow(self, draft: Any, cut: Any) -> Any:
        if cut.dim != 0:
            return False
        draft.same(cut.axis, cut)
        return True


class Wrong(OnStripes):
    """Sets no layouts."""

    def follow(self, draft: Any, cut: Any) -> Any:
        return cut.dim == 0


class Forgetful(OnStripes):
    """Does not return whether it can."""

    def follow(self, draft: Any, cut: Any) -> Any:
        draft.same(cut.axis, cut)


class Doubled(Layer):
    """2 x, of parts that may be cut in any way, and of partial sums."""

    def forward(self, x: Any, context: Any) -> Any:
        return 2 * x, None

    def backward(self, dy: Any, saved: Any) -> Any:
        return 2 * dy

    def follow(self, draft: Any, cut: Any) -> bool:
        draft.same(cut.axis, cut)
        return True


def net(own: Layer) -> Net:
    return Sequential(Conv2d(3, 3, padding=1), own, Conv2d(2, 3, padding=1), Flatten(), Linear(2))


def test_a_layer_that_communicates_without_a_rule_is_refused_by_name():
    with pytest.raises(ValueError, match="mean: Centred communicates, so it must state along the"):
        check_plan(net(Centred(name="mean")), SHAPE, "spatial", meshes=[{"spatial": 2}])

    def rank(comm: Communicator) -> None:
        with pytest.raises(
            PlanError, match=r"axis spatial=2 which parts .* define follow\(self, dr"
        ):
            Model(net(Centred()), SHAPE, mesh=Mesh(comm, spatial=2))

    run_threads(2, rank)


def test_one_with_a_rule_computes_its_stripes():
    check_plan(
        net(OnStripes()), SHAPE, "spatial", meshes=[{"spatial": 3}, {"data": 2, "spatial": 2}]
    )


def test_without_ranks_a_layer_that_communicates_is_named():
    model = Model(net(OnStripes(name="mean")), SHAPE)
    calls = ((node, Sum(np.ones(1), ())) for node in model.graph.nodes if node.name == "mean")
    with pytest.raises(ValueError, match="mean: this layer exchanges arrays"):
        run_together([calls], None)  # type: ignore[list-item]


def test_without_a_mesh_and_along_the_axis_of_samples_no_rule_is_needed():
    Model(net(Centred()), SHAPE)
    run_threads(2, lambda comm: Model(net(Centred()), SHAPE, mesh=Mesh(comm, data=2)))


@each(
    ("own", "message"),
    [
        (Wrong, "own: Wrong.follow must set the layouts of inputs and output along the axis spati"),
        (Forgetful, "Forgetful.follow: its result must be true or false, got None"),
    ],
)
def test_a_rule_that_is_incomplete_is_refused(own, message):
    def rank(comm: Communicator) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            Model(net(own(name="own")), SHAPE, mesh=Mesh(comm, spatial=2))

    run_threads(2, rank)


@each("strategy", ["spatial", "filter", "channel"], few=1)
def test_a_layer_of_elements_follows_any_cut_and_nothing_is_gathered(strategy):
    check_plan(net(Doubled()), SHAPE, strategy, meshes=[{strategy: 2}])

    def rank(comm: Communicator) -> None:
        model = Model(net(Doubled(name="own")), SHAPE, mesh=Mesh(comm, **{strategy: 2}))
        (node,) = (node for node in model.graph.nodes if node.name == "own")
        assert isinstance(node.layout[strategy], Cut)

    run_threads(2, rank)
