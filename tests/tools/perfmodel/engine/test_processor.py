from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.waiting import number_of_tests
from pydtnn.tools.perfmodel.calibration import processor
from pydtnn.tools.perfmodel.calibration.processor import measure_processor
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.platform import Link, Platform
from pydtnn.tools.perfmodel.virtual import Processor, run_virtual
from pydtnn.utils import clock
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


def test_the_processor_of_a_platform_copies_at_its_rate():
    platform = Platform.load("laptop")
    messages = replace(platform.messages, call=2e-6, copy=1e9, allreduce=None)
    assert Processor.of(replace(platform, messages=messages)) == Processor(2e-6, 1e-9, 0.0)


def test_one_rank_has_no_messages():
    assert run_threads(1, measure_processor, None) == [Processor()]


@each(("hosts", "seconds"), [("aa", 1.0), ("aaaa", 1.5), ("ab", 0.0)])
def test_ranks_of_a_host_add_their_parts_of_a_sum_themselves(hosts, seconds):
    def rank(comm):
        comm.allreduce(np.zeros(1000, "u1"))

    network, costs = cluster(hosts), UniformCosts()
    usual, adding = (
        run_virtual(rank, network=network, costs=costs, processor=Processor(add=add)).seconds
        for add in (0.0, 2.0 / 1000)
    )
    assert np.subtract(adding, usual) == pytest.approx([seconds] * len(hosts), abs=1e-6)


def test_ranks_that_sleep_take_time_for_tests():
    own = Processor(wake=1e-3, test=2e-3)
    assert own.testing(0.1) == 2e-3 * number_of_tests(0.1, 3e-3)


@each("cores", [1, 8])
@each(
    ("hosts", "own"),
    [
        ("aabb", Processor(1e-5, copy=2e-9, add=1e-9)),
        ("ab", Processor(1e-5, eager=processor.LENGTHS[0])),
        ("ab", Processor(1e-5, eager=processor.LENGTHS[3])),
        ("ab", Processor(1e-5, wake=1e-4, test=1.2e-4)),
    ],
)
def test_virtual_ranks_measure_the_processor_that_they_have(hosts, own, cores, monkeypatch):
    network = Network.create(
        [*map(hosts.index, hosts)], latency=1e-3, bandwidth=1e8, local_latency=1e-4
    )

    def spend(seconds):
        rank = clock.virtual()
        rank.engine.spend(rank._rank, seconds)

    times = {"perf_counter": clock.now, "thread_time": clock.now}
    sleep = SimpleNamespace(sleep=lambda seconds: spend(seconds + (own.wake or 0.0)), **times)
    monkeypatch.setattr(processor, "time", sleep)
    monkeypatch.setattr(processor, "sleeps", lambda: own.wake is not None)
    monkeypatch.setattr(processor.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(processor.np, "matmul", lambda x, y, out: spend(1e-4))
    costs = UniformCosts()
    link = Link(1e-3, 1e8)
    found = run_virtual(measure_processor, link, network=network, costs=costs, processor=own)
    one, *others = found.results
    assert others == [one] * (len(hosts) - 1)
    # a message of an element in a ring, whose end is noticed late, or of 64 B, which are copied
    late, nbytes = (own.notice(1e-3), 4) if own.wake else (0.0, 64)
    message = 2 * own.call + 1e-3 + nbytes / 1e8 + late
    beside = 2 if (hosts, cores) == ("aabb", 1) else 1  # ranks of a core
    expected = own._replace(call=message / 2 / beside, add=own.add / beside)
    assert one._replace(wake=0) == pytest.approx(expected._replace(wake=0), rel=1e-3, abs=1e-15)
    assert one.wake == pytest.approx(own.wake)
