"""Predicted times are those of the closed formulas, and messages that meet share their links."""

from math import log2

import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.cost import cost
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.network import Network, Route
from pydtnn.comm.schedules.steps import ALL, add, part, receive, send
from pydtnn.comm.schedules.timeline import ScheduleError
from tests.each import each

LATENCY, BANDWIDTH, ADD = 3e-5, 1.25e8, 2e-10
N = 1_234_567
EXACT = 1e-5
"""The replay ends messages half a byte early, so that rounding cannot keep them for ever."""


def uniform(hosts, **numbers):
    return Network.create(
        hosts, **{"latency": LATENCY, "bandwidth": BANDWIDTH, "add": ADD, **numbers}
    )


def test_prices_are_those_of_the_formulas():
    for p in (2, 3, 7, 16):
        network, rounds = uniform(range(p)), 2 * (p - 1)
        expected = rounds * (LATENCY + N / p / BANDWIDTH) + (p - 1) * N / p * ADD
        assert cost("ring", N, network) == pytest.approx(expected, rel=EXACT)
    for p in (2, 4, 16):
        network, whole = uniform(range(p)), LATENCY + N / BANDWIDTH + N * ADD
        predicted = cost("recursive_doubling", N, network)
        assert predicted == pytest.approx(log2(p) * whole, rel=EXACT)
        bytes_sent = 2 * (p - 1) / p * N
        expected = 2 * log2(p) * LATENCY + bytes_sent * (1 / BANDWIDTH + ADD / 2)
        assert cost("halving_doubling", N, network) == pytest.approx(expected, rel=EXACT)


def test_two_ranks_of_a_host_share_its_network_card():
    inside = {"local_latency": 1e-6, "local_bandwidth": 1e10}
    expected = (1e-6 + N / 1e10) + (LATENCY + 2 * N / BANDWIDTH) + 2 * N * ADD
    predicted = cost("recursive_doubling", N, uniform("aabb", **inside))
    assert predicted == pytest.approx(expected, rel=EXACT)


def test_the_hierarchical_schedule_beats_the_flat_ring_where_links_between_hosts_are_slow():
    network = uniform("aabb", local_latency=1e-6, local_bandwidth=1e10)
    ratio = cost("ring", 2_600_000, network) / cost("hierarchical", 2_600_000, network)
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
    assert cost(relay, N, uniform("abc")) == pytest.approx(expected, rel=EXACT)


def test_who_waits_for_two_messages_goes_on_when_both_are_there():
    def gather(group):
        if group.rank == 0:
            yield add(1, part(0, 3)), add(2, part(1, 2))
        else:
            yield (send(0, part(0, 3) if group.rank == 1 else part(1, 2)),)

    # The card of rank 0 is full until the last byte of both has come.
    expected = LATENCY + (N / 3 + N / 2) * (1 / BANDWIDTH + ADD)
    assert cost(gather, N, uniform("abc")) == pytest.approx(expected, rel=EXACT)


def test_a_pair_of_hosts_may_be_slower_than_their_cards():
    network = uniform("ab", add=0.0)
    slow = {pair: route._replace(bandwidth=BANDWIDTH / 4) for pair, route in network.routes.items()}
    network = Network(network.hosts, slow, network.links)
    expected = LATENCY + 4 * N / BANDWIDTH
    assert cost("recursive_doubling", N, network) == pytest.approx(expected, rel=EXACT)


def test_chunks_are_added_while_others_are_under_way():
    slow = uniform("ab", add=4 / BANDWIDTH)  # longer than a message takes
    whole = cost("recursive_doubling", N, slow, chunk_bytes=N)
    cut = cost("recursive_doubling", N, slow, chunk_bytes=N // 16)
    assert whole == pytest.approx(LATENCY + 5 * N / BANDWIDTH, rel=EXACT)
    assert 4 * N / BANDWIDTH < cut < 0.95 * whole


@each("hosts", ["aa", "aab", "abcd"])
@each("chosen", [{}, {"active": 1}, {"active": 5}])
def test_a_price_is_for_as_many_chunks_at_a_time_as_the_executor_has_under_way(hosts, chosen):
    def shift(group):
        """One round, so that the messages of the chunks under way are all that is posted."""
        yield send((group.rank + 1) % group.size, ALL), receive((group.rank - 1) % group.size, ALL)

    chunks, latency = 20, 1.0

    def active(comm):
        return Scheduled(comm, shift, **chosen).active

    (executed,) = set(run_threads(len(hosts), active, hosts=hosts))
    # Messages that take a latency and no more: as many turns as the chunks need.
    free = uniform(hosts, latency=latency, bandwidth=1e12, add=0.0)
    turns = cost(shift, 8 * chunks, free, chunk_bytes=8, **chosen) / latency
    assert turns == pytest.approx(-(-chunks // executed), rel=EXACT)


@each("hosts", ["a", "aaabb"])
@each("algorithm", SCHEDULES)
def test_every_schedule_has_a_price_that_grows_with_the_array(algorithm, hosts):
    prices = [cost(algorithm, n, uniform(hosts)) for n in (0, 1, 1000, 10_000_000)]
    assert prices == sorted(prices)
    assert (prices[-1] > 0) == (len(hosts) > 1)


def test_what_has_no_price_is_refused():
    def deaf(group):
        yield (send(1 - group.rank, ALL),)

    with pytest.raises(ScheduleError, match="receive"):
        cost(deaf, N, uniform("ab"))
    with pytest.raises(ValueError, match="bandwidth above 0"):
        uniform("ab", bandwidth=0.0)
    with pytest.raises(ValueError, match="uses the link 'wire'"):
        Network(("a", "b"), {("a", "b"): Route(0.0, 1.0, ("wire",))}, {})
