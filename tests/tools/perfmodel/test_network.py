"""Measured networks have all routes, and are the same on all ranks."""

import pytest

from pydtnn.tools.perfmodel import network as network_module
from pydtnn.tools.perfmodel.network import LONG, Network, Route
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.utils import clock
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts


@each("emulated", [False, True])
def test_virtual_ranks_measure_the_network_that_they_have(emulated, monkeypatch):
    speeds = {"latency": 1e-3, "bandwidth": 1e8, "local_latency": 1e-4, "local_bandwidth": 1e9}
    own = Network.create("aabbbcc", **speeds, memory=4e9, add=1e-9)
    monkeypatch.setattr(network_module, "machine", lambda: 0 if emulated else clock.virtual()._rank)
    first, *others = run_virtual(Network.measure, network=own, costs=UniformCosts()).results
    assert others == [first] * 6
    assert first.hosts == (0, 0, 2, 2, 2, 5, 5)
    assert {*first.routes} == {(a, b) for a in (0, 2, 5) for b in (0, 2, 5)}
    for (here, there), route in first.routes.items():
        expected = own.route(here, here + 1 if here == there else there)
        assert route[:2] == pytest.approx(expected[:2], rel=1e-3)
    assert len(first.links) == 9
    inside = {"inside 0": 2, "inside 2": 3, "inside 5": 2}  # ranks that write at the same time
    for link, capacity in first.links.items():
        latency, bandwidth = (1e-4, inside[link] * 1e9) if link in inside else (1e-3, 1e8)
        ranks = inside.get(link, 2)
        rate = ranks * LONG / (latency + ranks * LONG / bandwidth)
        expected = 1e8 if emulated and link not in inside else rate
        assert capacity == pytest.approx(expected, rel=1e-3)


@pytest.mark.mpi(2)
def test_the_ranks_of_a_job_measure_their_network(comm):
    network = Network.measure(comm)
    assert network == comm.gather_object(network)[0]


def test_a_network_without_bandwidths_or_links_is_refused():
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Network.create("ab", latency=1e-5, bandwidth=0.0)
    with pytest.raises(ValueError, match="uses the link 'wire'"):
        Network(("a", "b"), {("a", "b"): Route(0.0, 1.0, ("wire",))}, {})
