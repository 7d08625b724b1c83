"""Waits of virtual ranks, whose times are exact."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis import (
    waits,
)
from pydtnn.tools.tracing.recorder import Recorder
from pydtnn.tools.tracing.writing import Trace
from pydtnn.utils import clock
from pydtnn.utils.observer import phase
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


@each("others", [1, 3])
def test_ranks_wait_for_those_of_their_group(others, tmp_path):
    """Ranks 0, 2 and 1, 3 sum apart from each other, the former more often and with one late."""

    def sums(comm: Communicator) -> None:
        own = clock.current()
        recorder = Recorder(clock=own)
        comm.traffic.observer = recorder
        with Trace(tmp_path, recorder, comm), comm.split(comm.rank % 2) as group:
            for step in range(4):
                recorder.step(0, step)
                with phase(recorder, "step"):
                    own.spend(0.1 * (comm.rank == 3))
                    for _ in range(others if comm.rank % 2 == 0 else 1):
                        own.spend(0.05 * (comm.rank == 2))
                        group.allreduce(np.zeros(3))

    run_virtual(sums, network=cluster("abcd"), costs=UniformCosts())
    found = waits(load_timeline(tmp_path))
    assert found[1, 3] == pytest.approx(4 * 0.1, rel=0.01)
    assert found[0, 2] == pytest.approx(4 * 0.05 * others, rel=0.01)
    found[1, 3] = found[0, 2] = 0
    assert found.max() < 1e-3  # rank 3 is the last one in every sum of its group
