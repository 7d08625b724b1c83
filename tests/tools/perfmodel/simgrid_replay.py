"""Replay of messages by SimGrid: reads JSON on the standard input, prints the time in s.

Run by a Python that has the module `simgrid`, such as that of Debian with python3-simgrid.

SimGrid's model CM02 divides links in proportion to 1 / (latency + sum of weight-S / bandwidth), as
TCP does on routes of different length. Routes are given further links here, which limit nothing, so
that this sum is the same for all: then links are divided equally (max-min fairness). The lazy
optimisation is off: with links that limit each message alone, it leaves out updates of rates.
"""

import json
import sys
from math import ceil

from simgrid import Actor, Comm, Engine, Link, LinkInRoute, Mailbox, NetZone

WEIGHT = "1e9"
"""weight-S, in B: large enough for latencies not to matter."""


def rank(own, rounds):
    sent, received = {}, {}
    for sends, receives in rounds:
        pending, payloads = [], []  # a payload must exist until its message has arrived
        for peer, nbytes in sends:
            number = sent[peer] = sent.get(peer, 0) + 1
            pending.append(Mailbox.by_name(f"{own} {peer} {number}").put_async("x", round(nbytes)))
        for peer in receives:
            number = received[peer] = received.get(peer, 0) + 1
            one, payload = Mailbox.by_name(f"{peer} {own} {number}").get_async()
            pending.append(one)
            payloads.append(payload)
        Comm.wait_all(pending)


class Links:
    """Links by name: those that messages share, and those that limit each message alone."""

    def __init__(self, zone):
        self.zone, self.known = zone, {}

    def shared(self, name, bandwidth):
        return self._link(name, bandwidth, 0.0, Link.SharingPolicy.SHARED)

    def alone(self, name, bandwidth, latency=0.0):
        return self._link(name, bandwidth, latency, Link.SharingPolicy.FATPIPE)

    def _link(self, name, bandwidth, latency, policy):
        if name not in self.known:
            link = self.zone.create_link(name, bandwidth)
            link.set_latency(latency)
            link.set_sharing_policy(policy, None)
            link.seal()
            self.known[name] = LinkInRoute(link)
        return self.known[name]


def full_zone(case):
    """A zone with the given routes, one host for each rank."""
    zone = NetZone.create_full_zone("cluster")
    links, capacity = Links(zone), case["links"]
    weights = [
        1 / bandwidth + 1 / (2 * bandwidth) + sum(1 / capacity[name] for name in names)
        for _, _, _, bandwidth, names in case["routes"]
    ]
    hosts = [zone.create_host(f"rank{number}", 1e9) for number in range(len(case["rounds"]))]
    for (source, target, latency, bandwidth, names), weight in zip(
        case["routes"], weights, strict=True
    ):
        route = [
            links.alone(f"alone {bandwidth}", bandwidth),
            links.alone(f"latency {latency} {bandwidth}", 2 * bandwidth, latency),
            *(links.shared(name, capacity[name]) for name in names),
        ]
        missing = max(weights) - weight
        if missing > 1e-9 * weight:
            number = ceil(2 * bandwidth * missing)
            further = number / missing
            route += [links.alone(f"further {k} {further:.9g}", further) for k in range(number)]
        zone.add_route(hosts[source].netpoint, hosts[target].netpoint, None, None, route, False)
    zone.seal()
    return hosts


def main():
    case = json.load(sys.stdin)
    engine = Engine(
        [
            "replay",
            "--cfg=network/model:CM02",
            "--cfg=network/crosstraffic:0",
            "--cfg=network/TCP-gamma:0",
            "--cfg=network/latency-factor:1",
            "--cfg=network/bandwidth-factor:1",
            f"--cfg=network/weight-S:{WEIGHT}",
            "--cfg=network/optim:Full",
            "--log=root.thresh:error",
        ]
    )
    hosts = full_zone(case)
    for own, rounds in enumerate(case["rounds"]):
        Actor.create(f"rank{own}", hosts[own], rank, own, rounds)
    engine.run()
    print(Engine.clock)


main()
