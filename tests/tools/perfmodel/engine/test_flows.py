"""Messages that share links, against a simulation without any shortcut."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest

from pydtnn.tools.perfmodel.engine.flows import Flows, fair_rates
from pydtnn.tools.perfmodel.network import Network
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


@each("seed", range(5))
def test_random_messages_end_when_the_rates_of_the_textbook_have_passed_their_bytes(seed):
    rng = random.Random(seed)
    messages = sorted(
        (rng.uniform(0, 0.5), (rng.choice("abcd"), rng.choice("abc")), rng.uniform(1e3, 2e7))
        for _ in range(60)
    )
    flows, left, before = Flows(NETWORK), dict[object, float](), 0.0
    waiting = dict(enumerate(messages))
    while waiting or left:
        start = min((begins for begins, _, _ in waiting.values()), default=inf)
        now = min(start, flows.next_end())
        rates = plain_rates(NETWORK, Counter(messages[n][1] for n in left))
        left = {n: nbytes - rates[messages[n][1]] * (now - before) for n, nbytes in left.items()}
        before = now
        for name in flows.end(now):
            assert abs(left.pop(name)) < 1  # half a byte early, see `ROUNDING`
        if now == start:
            number = min(waiting)
            _, pair, left[number] = waiting.pop(number)
            flows.start(now, pair, left[number], number)


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
