"""Sums on virtual ranks take the times of the literature, and messages that meet share links."""

from math import log2

import pytest

from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.steps import add, part, receive, send
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual import sum_seconds
from tests.each import each

LATENCY, BANDWIDTH, ADD = 3e-5, 1.25e8, 2e-10
N = 1_234_567
EXACT = 1e-5
"""Messages end half a byte early, and parts have whole numbers of elements."""


def uniform(hosts, **numbers):
    return Network.create(
        hosts, **{"latency": LATENCY, "bandwidth": BANDWIDTH, "add": ADD, **numbers}
    )


def test_prices_are_those_of_the_formulas():
    for p in (2, 3, 7, 16):
        network, rounds = uniform(range(p)), 2 * (p - 1)
        expected = rounds * (LATENCY + N / p / BANDWIDTH) + (p - 1) * N / p * ADD
        assert sum_seconds("ring", N, network) == pytest.approx(expected, rel=EXACT)
    for p in (2, 4, 16):
        network, whole = uniform(range(p)), LATENCY + N / BANDWIDTH + N * ADD
        predicted = sum_seconds("recursive_doubling", N, network)
        assert predicted == pytest.approx(log2(p) * whole, rel=EXACT)
        bytes_sent = 2 * (p - 1) / p * N
        expected = 2 * log2(p) * LATENCY + bytes_sent * (1 / BANDWIDTH + ADD / 2)
        assert sum_seconds("halving_doubling", N, network) == pytest.approx(expected, rel=EXACT)


def test_two_ranks_of_a_host_share_its_network_card():
    inside = {"local_latency": 1e-6, "local_bandwidth": 1e10}
    expected = (1e-6 + N / 1e10) + (LATENCY + 2 * N / BANDWIDTH) + 2 * N * ADD
    predicted = sum_seconds("recursive_doubling", N, uniform("aabb", **inside))
    assert predicted == pytest.approx(expected, rel=EXACT)


def test_the_hierarchical_schedule_beats_the_flat_ring_where_links_between_hosts_are_slow():
    network = uniform("aabb", local_latency=1e-6, local_bandwidth=1e10)
    ratio = sum_seconds("ring", 2_600_000, network) / sum_seconds(
        "hierarchical", 2_600_000, network
    )
    assert ratio == pytest.approx(1.5, rel=0.03)  # 6/4 n against n per card


def test_a_message_starts_when_both_ranks_have_come_to_it():
    def relay(group):
        if group.rank == 0:
            yield (send(1, part(0, 2)),)
        elif group.rank == 1:
            yield (receive(0, part(0, 2)),)
            yield (send(2, part(1, 2)),)
        else:
            yield (receive(1, part(1, 2)),)

    expected = 2 * (LATENCY + N / 2 / BANDWIDTH)
    assert sum_seconds(relay, N, uniform("abc")) == pytest.approx(expected, rel=EXACT)


def test_who_waits_for_two_messages_goes_on_when_both_are_there():
    def gather(group):
        if group.rank == 0:
            yield add(1, part(0, 3)), add(2, part(1, 2))
        else:
            yield (send(0, part(0, 3) if group.rank == 1 else part(1, 2)),)

    # The card of rank 0 is full until the last byte of both has come.
    expected = LATENCY + (N / 3 + N / 2) * (1 / BANDWIDTH + ADD)
    assert sum_seconds(gather, N, uniform("abc")) == pytest.approx(expected, rel=EXACT)


def test_a_pair_of_hosts_may_be_slower_than_their_cards():
    network = uniform("ab", add=0.0)
    pairs = ("a", "b"), ("b", "a")
    slow = {pair: network.routes[pair]._replace(bandwidth=BANDWIDTH / 4) for pair in pairs}
    network = Network(network.hosts, slow, network.links)
    expected = LATENCY + 4 * N / BANDWIDTH
    assert sum_seconds("recursive_doubling", N, network) == pytest.approx(expected, rel=EXACT)


@each("hosts", ["a", "aaabb"])
@each("algorithm", SCHEDULES)
def test_every_schedule_has_a_price_that_grows_with_the_array(algorithm, hosts):
    prices = [sum_seconds(algorithm, n, uniform(hosts)) for n in (0, 1, 1000, 10_000_000)]
    assert prices == sorted(prices)
    assert (prices[-1] > 0) == (len(hosts) > 1)
