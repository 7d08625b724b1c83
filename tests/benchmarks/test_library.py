import numpy as np
import pytest

from benchmarks.accuracy.library import LENGTHS, MeasuredLibrary
from pydtnn.comm import run_threads
from pydtnn.perfmodel.virtual import Processor, run_virtual
from tests.perfmodel.virtual.costs import UniformCosts, cluster

TIMES = (1.0, 2.0, 2.0, 10.0)


def test_times_are_interpolated_and_continued():
    library = MeasuredLibrary(2, {"broadcast": TIMES})
    assert library.time("broadcast", 0, 2) == 1.0
    assert library.time("broadcast", (LENGTHS[0] + LENGTHS[1]) // 2, 2) == pytest.approx(1.5)
    assert [library.time("broadcast", n, 2) for n in LENGTHS] == pytest.approx(TIMES)
    further = LENGTHS[3] + (LENGTHS[3] - LENGTHS[2])
    assert library.time("broadcast", further, 2) == pytest.approx(18.0)


def test_other_calls_and_other_groups_were_not_measured():
    library = MeasuredLibrary(2, {"broadcast": TIMES})
    assert library.time("allgather", 64, 2) is None
    assert library.time("broadcast", 64, 3) is None


def test_all_ranks_measure_the_same_times_of_every_kind():
    one, other = run_threads(2, MeasuredLibrary.measure)
    assert one == other
    assert set(one.seconds) == {"allreduce", "reduce_scatter", "allgather", "broadcast"}
    assert all(len(times) == len(LENGTHS) for times in one.seconds.values())


def test_virtual_ranks_take_the_measured_time_after_the_last_one_has_called():
    def rank(comm):
        comm.broadcast(np.zeros(LENGTHS[3], "u1"))

    processor = Processor(library=MeasuredLibrary(2, {"broadcast": TIMES}).time)
    run = run_virtual(rank, network=cluster("ab"), costs=UniformCosts(), processor=processor)
    before = run_virtual(lambda comm: None, network=cluster("ab"), costs=UniformCosts())
    assert np.subtract(run.seconds, before.seconds) == pytest.approx([10.0] * 2)
