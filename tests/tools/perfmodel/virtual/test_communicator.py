"""The communicator of virtual ranks fulfils the contract of all communicators."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pydtnn.comm import Communicator
from pydtnn.tools.perfmodel.virtual import run_virtual
from tests.comm.communicator_contract import CommunicatorContract
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


def virtual(ranks: int, function: Callable[[Communicator], None]) -> None:
    """Call a function on virtual ranks, two on each host."""
    network = cluster("aabbccdd"[:ranks])
    run_virtual(function, network=network, costs=UniformCosts())


@pytest.mark.threads(1, 3, run=virtual)
class TestVirtual(CommunicatorContract):
    pass
