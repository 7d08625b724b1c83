"""Random networks under random plans, on random meshes of ranks, compute what serial ones do."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest

from pydtnn.model.partition import Plan
from pydtnn.tools.testing import check_plan
from tests.parallel.trajectories import FRAGILE, Expected, scales
from tests.random_cases import Case
from tests.random_networks import Network, for_each_network

STRATEGIES = ["filter", "channel", "alternate", "spatial", "width", "data"]

MESHES = [{"a": 2}, {"a": 3}, {"a": 4}, {"data": 2, "a": 2}, {"a": 2, "b": 2}]

TOLERANCE = 1e-9
"""Deep networks with batch norm over a few rows enlarge rounding."""


def random_plan(rng: np.random.Generator, axes: list[str]) -> Plan:
    """Another strategy along each axis, for layers with even and odd numbers in their names."""

    def own() -> dict[str, str]:
        return dict(zip(rng.permutation(STRATEGIES).tolist(), axes, strict=False))

    plan = Plan({"*[02468]": own(), "*": own()})
    plan.explicit = False
    return plan


def is_fragile(network: Network) -> bool:
    """Whether little changes of outputs are enlarged, or training diverges."""
    expected = Expected.of(network)
    changes = expected.changes()
    return not all(changes[k] <= FRAGILE * n for k, n in scales(expected.record).items())


@pytest.mark.fuzz("plans")
def test_a_network_under_a_plan_does_what_the_serial_one_does(cases):
    def check(case: Case, network: Network) -> None:
        rng = np.random.default_rng([network.seed, case.number])
        mesh = MESHES[rng.integers(len(MESHES))]
        plan = random_plan(rng, [axis for axis in mesh if axis != "data"])
        hypothesis.note(f"check_plan(net, {network.inputs}, {plan}, meshes=[{mesh}])")
        try:
            with np.errstate(all="ignore"):
                case.compare(
                    check_plan,
                    network.net,
                    network.inputs,
                    plan,
                    meshes=[mesh],
                    batch=network.batch,
                    tolerance=TOLERANCE,
                )
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017  # the plan is not possible
        except AssertionError:
            if is_fragile(network):
                hypothesis.reject()
            raise

    for_each_network(cases, check, shared=True)
