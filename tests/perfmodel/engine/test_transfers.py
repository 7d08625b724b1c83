"""Messages that share links, against the simulation of all routes at once."""

from __future__ import annotations

import random

import pytest

from pydtnn.comm.schedules.cost import Flows
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.engine.transfers import Transfers

NETWORK = Network.create(
    "aabbccd", latency=0.0, bandwidth=1e8, local_latency=0.0, local_bandwidth=3e8, memory=4e8
)


def ends_of_flows(messages: list[tuple[float, tuple[str, str], float]]) -> dict[int, float]:
    flows, ends = Flows(NETWORK), {}
    waiting = [(time, pair, (n, 0), nbytes) for n, (time, pair, nbytes) in enumerate(messages)]
    while waiting or flows.rates:
        now = min([flows.next_end(), *(time for time, *_ in waiting[:1])])
        ends |= {name[0]: now for name in flows.advance(now)}
        starting = [one for one in waiting if one[0] <= now]
        waiting = waiting[len(starting) :]
        if starting:
            flows.start(one[1:] for one in starting)
    return ends


def ends_of_transfers(messages: list[tuple[float, tuple[str, str], float]]) -> dict[int, float]:
    transfers, ends, started = Transfers(NETWORK), {}, 0
    while len(ends) < len(messages):
        next_start = messages[started][0] if started < len(messages) else float("inf")
        now = min(next_start, transfers.next_end())
        ends |= {int(str(name)): now for name in transfers.end(now)}
        while started < len(messages) and messages[started][0] <= now:
            _, pair, nbytes = messages[started]
            transfers.start(now, pair, nbytes, started)
            started += 1
    return ends


@pytest.mark.parametrize("seed", range(5))
def test_random_messages_end_as_in_the_simulation_of_all_routes(seed):
    rng = random.Random(seed)
    messages = sorted(
        (rng.uniform(0, 0.5), (rng.choice("abcd"), rng.choice("abc")), rng.uniform(1e3, 2e7))
        for _ in range(60)
    )
    expected = ends_of_flows(messages)
    assert ends_of_transfers(messages) == pytest.approx(expected, rel=1e-6)


def test_a_message_of_no_bytes_ends_at_once():
    transfers = Transfers(NETWORK)
    transfers.start(1.0, ("a", "b"), 0.0, "empty")
    assert transfers.next_end() == 1.0
    assert transfers.end(1.0) == ["empty"]
    assert transfers.next_end() == float("inf")


def test_other_rates_hold_from_the_change():
    transfers = Transfers(NETWORK)
    transfers.start(0.0, ("a", "b"), 1e8, "message")
    slow = Network.create("aabbccd", latency=0.0, bandwidth=5e7)
    assert transfers.next_end() == pytest.approx(1.0)
    transfers.change(0.5, slow)
    assert transfers.next_end() == pytest.approx(1.5)
