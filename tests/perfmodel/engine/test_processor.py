from dataclasses import replace

import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.virtual import Processor, run_virtual
from tests.perfmodel.virtual.costs import UniformCosts, cluster


def test_the_processor_of_a_platform_copies_at_its_rate():
    platform = Platform.load("laptop")
    messages = replace(platform.messages, call=2e-6, copy=1e9, allreduce=None)
    assert Processor.of(replace(platform, messages=messages)) == Processor(2e-6, 1e-9, 0.0)


def test_all_ranks_measure_the_same_processor():
    one, other = run_threads(2, Processor.measure)
    assert one == other
    assert one.call > 0
    assert one.add >= 0


def test_one_rank_has_no_messages_to_measure():
    assert run_threads(1, Processor.measure) == [Processor()]


@pytest.mark.parametrize(("hosts", "seconds"), [("aa", 2.0), ("ab", 0.0)])
def test_ranks_of_a_host_add_the_arrays_of_a_sum_themselves(hosts, seconds):
    def rank(comm):
        comm.allreduce(np.zeros(1000, "u1"))

    network, costs = cluster(hosts), UniformCosts()
    usual, adding = (
        run_virtual(rank, network=network, costs=costs, processor=Processor(add=add)).seconds
        for add in (0.0, seconds / 1000)
    )
    assert np.subtract(adding, usual) == pytest.approx([seconds] * 2, abs=1e-6)
