"""Measured networks have what `cost` needs, and are the same on all ranks."""

from itertools import combinations

import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.network import Network
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
    assert (cost("ring", 10_000, networks[0]) > 0) == (len(hosts) > 1)


@pytest.mark.mpi(2)
def test_the_ranks_of_a_job_measure_their_network(comm):
    network = Network.measure(comm)
    assert cost("ring", 100_000, network) == comm.gather_object(cost("ring", 100_000, network))[0]
