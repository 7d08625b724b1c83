"""Messages that share links, against a simulation without any shortcut."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pydtnn.comm.schedules.flows import Flows, fair_rates
from pydtnn.comm.schedules.network import Network
from tests.each import each

NETWORK = Network.create(
    "aabbccd", latency=0.0, bandwidth=1e8, local_latency=0.0, local_bandwidth=3e8, memory=4e8
)


def plain_rates(
    network: Network, counts: dict[tuple[str, str], int]
) -> dict[tuple[str, str], float]:
    """Max-min fairness as in the textbook: raise all rates together until a link is full."""
    rates: dict[tuple[str, str], float] = {}
    while len(rates) < len(counts):
        limits = {}
        for pair in counts.keys() - rates.keys():
            shares = [network.routes[pair].bandwidth]
            for link in network.routes[pair].links:
                users = [other for other in counts if link in network.routes[other].links]
                used = sum(counts[o] * rates[o] for o in users if o in rates)
                growing = sum(counts[o] for o in users if o not in rates)
                shares.append((network.links[link] - used) / growing)
            limits[pair] = min(shares)
        least = min(limits.values())
        rates |= {pair: least for pair, limit in limits.items() if limit <= least * (1 + 1e-9)}
    return rates


def ends_of_all(messages: list[tuple[float, tuple[str, str], float]]) -> dict[int, float]:
    """Simulate all messages at once, from one start or end to the next."""
    now, ends = 0.0, {}
    left: dict[int, float] = {}
    waiting = dict(enumerate(messages))
    while waiting or left:
        counts = Counter(messages[n][1] for n in left)
        rates = plain_rates(NETWORK, counts)
        by_number = {n: rates[messages[n][1]] for n in left}
        next_end = min((now + left[n] / by_number[n] for n in left), default=float("inf"))
        next_start = min((messages[n][0] for n in waiting), default=float("inf"))
        after = min(next_end, next_start)
        left = {n: nbytes - by_number[n] * (after - now) for n, nbytes in left.items()}
        now = after
        ended = [n for n, nbytes in left.items() if nbytes < 0.5]
        ends |= {n: now for n in ended}
        left = {n: nbytes for n, nbytes in left.items() if n not in ended}
        for n in [n for n in waiting if messages[n][0] <= now]:
            left[n] = waiting.pop(n)[2]
    return ends


def ends_of(messages: list[tuple[float, tuple[str, str], float]]) -> dict[int, float]:
    flows, ends, started = Flows(NETWORK), {}, 0
    while len(ends) < len(messages):
        next_start = messages[started][0] if started < len(messages) else float("inf")
        now = min(next_start, flows.next_end())
        ends |= {int(str(name)): now for name in flows.end(now)}
        while started < len(messages) and messages[started][0] <= now:
            _, pair, nbytes = messages[started]
            flows.start(now, pair, nbytes, started)
            started += 1
    return ends


@each("seed", range(5))
def test_random_messages_end_as_in_the_plain_simulation(seed):
    rng = random.Random(seed)
    messages = sorted(
        (rng.uniform(0, 0.5), (rng.choice("abcd"), rng.choice("abc")), rng.uniform(1e3, 2e7))
        for _ in range(60)
    )
    expected = ends_of_all(messages)
    assert ends_of(messages) == pytest.approx(expected, rel=1e-6)


@each("seed", range(5))
def test_rates_are_those_of_the_textbook(seed):
    rng = random.Random(seed)
    pairs = [(g, h) for g in "abcd" for h in "abcd" if (g, h) != ("d", "d")]
    counts = {pair: rng.randint(1, 4) for pair in rng.sample(pairs, 9)}
    assert fair_rates(NETWORK, counts) == pytest.approx(plain_rates(NETWORK, counts))


def test_a_message_of_no_bytes_ends_at_once():
    flows = Flows(NETWORK)
    flows.start(1.0, ("a", "b"), 0.0, "empty")
    assert flows.next_end() == 1.0
    assert flows.end(1.0) == ["empty"]
    assert flows.next_end() == float("inf")


def test_other_rates_hold_from_the_change():
    flows = Flows(NETWORK)
    flows.start(0.0, ("a", "b"), 1e8, "message")
    slow = Network.create("aabbccd", latency=0.0, bandwidth=5e7)
    assert flows.next_end() == pytest.approx(1.0)
    flows.change(0.5, slow)
    assert flows.next_end() == pytest.approx(1.5)
