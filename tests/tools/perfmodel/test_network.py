"""Networks have speeds above 0, and ranks measure the one that they have."""

import pytest

from pydtnn.tools.perfmodel.calibration import messages
from pydtnn.tools.perfmodel.calibration.messages import LONG, measure_links
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.utils import clock
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts


@each("hosts", ["aabbbcc", "abc", "aaa"])
@each("emulated", [False, True])
def test_virtual_ranks_measure_the_links_that_they_have(hosts, emulated, monkeypatch):
    speeds = {"latency": 1e-3, "bandwidth": 1e8, "local_latency": 1e-4, "local_bandwidth": 1e9}
    own = Network.create(hosts, **speeds, memory=4e9, add=1e-9)
    monkeypatch.setattr(messages, "machine", lambda: 0 if emulated else clock.virtual()._rank)
    first, *others = run_virtual(measure_links, network=own, costs=UniformCosts()).results
    assert others == [first] * (len(hosts) - 1)
    inside, between = first
    assert (inside is None, between is None) == (hosts == "abc", hosts == "aaa")
    ranks = sorted(map(hosts.count, {*hosts}))  # that write at the same time
    if inside is not None:
        rate = ranks[len(ranks) // 2] * LONG / (1e-4 + LONG / 1e9)
        assert [*vars(inside).values()] == pytest.approx([1e-4, 1e9, rate], rel=1e-3)
    if between is not None:
        rate = 1e8 if emulated else ranks[0] * LONG / (1e-3 + ranks[0] * LONG / 1e8)
        assert [*vars(between).values()] == pytest.approx([1e-3, 1e8, rate], rel=1e-3)


@pytest.mark.mpi(2)
def test_the_ranks_of_a_job_measure_their_links(comm):
    links = measure_links(comm)
    assert links == comm.gather_object(links)[0]


def test_a_network_without_bandwidths_is_refused():
    with pytest.raises(ValueError, match="bandwidth must be .*above 0"):
        Network.create("ab", latency=1e-5, bandwidth=0.0)
