"""Replay of messages by SimGrid: reads JSON on the standard input, prints the time in s.

Run by the system's Python, for which Debian's python3-simgrid is installed.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, LinkInRoute, Mailbox, NetZone


def rank(own, rounds):
    sent, received = {}, {}
    for steps in rounds:
        pending, payloads = [], []  # a payload must exist until its message has arrived
        for peer, nbytes in steps["send"]:
            number = sent[peer] = sent.get(peer, 0) + 1
            mailbox = Mailbox.by_name(f"{own} {peer} {number}")
            pending.append(mailbox.put_async("x", round(nbytes)))
        for peer in steps["receive"]:
            number = received[peer] = received.get(peer, 0) + 1
            one, payload = Mailbox.by_name(f"{peer} {own} {number}").get_async()
            pending.append(one)
            payloads.append(payload)
        Comm.wait_all(pending)


def main():
    case = json.load(sys.stdin)
    engine = Engine(["replay", *case["options"]])
    zone = NetZone.create_star_zone("cluster")
    hosts = {}
    for name in sorted(set(case["hosts"])):
        host = zone.create_host(f"host{name}", 1e9)
        card = zone.create_split_duplex_link(f"card{name}", case["bandwidth"])
        card.set_latency(case["latency"] / 2).seal()
        inside = zone.create_link(f"inside{name}", case["local_bandwidth"])
        inside.set_latency(case["local_latency"])
        inside.seal()
        up = LinkInRoute(card, LinkInRoute.Direction.UP)
        zone.add_route(host.netpoint, None, None, None, [up], True)
        zone.add_route(host.netpoint, host.netpoint, None, None, [LinkInRoute(inside)], False)
        hosts[name] = host
    zone.seal()
    for own, rounds in enumerate(case["rounds"]):
        Actor.create(f"rank{own}", hosts[case["hosts"][own]], rank, own, rounds)
    engine.run()
    print(Engine.clock)


main()
