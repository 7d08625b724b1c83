"""Measured networks have all routes, and are the same on all ranks."""

from itertools import combinations

import pytest

from pydtnn.comm import run_threads
from pydtnn.tools.perfmodel.network import Network, Route
from tests.each import each


@each("hosts", ["a", "aabbc"])
def test_all_ranks_measure_the_same_network_with_every_route_that_messages_can_take(hosts):
    networks = run_threads(len(hosts), Network.measure, hosts=hosts)
    assert all(network == networks[0] for network in networks)
    first = [hosts.index(host) for host in hosts]
    assert networks[0].hosts == tuple(first)
    for a, b in combinations(range(len(hosts)), 2):
        for pair in ((first[a], first[b]), (first[b], first[a])):
            route = networks[0].routes[pair]
            assert route.latency > 0
            assert all(networks[0].links[link] > 0 for link in route.links)


@pytest.mark.mpi(2)
def test_the_ranks_of_a_job_measure_their_network(comm):
    network = Network.measure(comm)
    assert network == comm.gather_object(network)[0]


def test_a_network_without_bandwidths_or_links_is_refused():
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Network.create("ab", latency=1e-5, bandwidth=0.0)
    with pytest.raises(ValueError, match="uses the link 'wire'"):
        Network(("a", "b"), {("a", "b"): Route(0.0, 1.0, ("wire",))}, {})
