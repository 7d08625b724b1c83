"""Messages between virtual ranks: they are matched in posting order, and take time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pydtnn.comm.checks import wrong_length
from pydtnn.comm.thread import Matching
from pydtnn.tools.perfmodel.engine.engine import Completion, Engine
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.network import Pair

WINDOW = 4
"""Length of the parts of a message that is not eager, relative to the longest eager one."""

MAX_UNEVEN = 256
"""Bytes by which messages of ranks that are alike may differ: arrays are cut in units."""

WAITING = 0.35
"""Time of a rank that waits to copy a byte, without its tests, relative to one that computes and
has other data in its caches. With 4 ranks on emulated hosts: 0.6 to 0.8 ns and 1.8 to 2.4 ns."""


@dataclass(slots=True)
class _Side:
    """One side of a message."""

    array: np.ndarray
    done: Completion
    rank: int
    peer: int | None


class PostOffice:
    """Matches the messages of a group, first in, first out, and lets them pass the network.

    A message starts when both sides are posted; after the latency its bytes flow. One between hosts
    that is longer than `Processor.eager` starts when the receiver has then been in a call and,
    after the latency, the sender, too; the sender has to be in a call for each further part, as MPI
    libraries send them.

    Parameters
    ----------
    engine : Engine
    members : sequence of int
        The ranks of the group, numbered among all ranks of the run.
    processor : Processor
    """

    def __init__(self, engine: Engine, members: Sequence[int], processor: Processor) -> None:
        self._engine, self._members, self._processor = engine, members, processor
        self._hosts: list[Hashable] = [engine.network.hosts[rank] for rank in members]
        self._matching: Matching[_Side] = Matching()
        self._places = {r: place for place, r in enumerate(members) if r < engine.executed}

    def send(self, sender: int, receiver: int, tag: int, array: np.ndarray) -> Completion:
        """Post an array to send, at the present time of the sender."""

        def match(side: _Side) -> None:
            if other := self._matching.send(sender, self._near(side), tag, side):
                self._deliver(side, other)

        return self._post(sender, receiver, array, match)

    def receive(self, sender: int | None, receiver: int, tag: int, array: np.ndarray) -> Completion:
        """Post an array to receive into, at the present time of the receiver."""

        def match(side: _Side) -> None:
            if other := self._matching.receive(self._near(side), receiver, tag, side):
                self._deliver(other, side)

        return self._post(receiver, sender, array, match)

    def copying(self, rank: int, peer: int | None) -> float:
        """Return the time in s/B for which a rank itself copies a message.

        Where ranks share cores, copies are work of the system, beside the computation of all ranks.
        A message from any rank is taken to be one of another host, if there is one.
        """
        others = self._hosts if peer is None else [self._hosts[peer]]
        between = any(host != self._hosts[rank] for host in others)
        return self._processor.copy if between and not self._engine.shared else 0.0

    def _near(self, side: _Side) -> Any:
        """Return the executed rank that takes the place of a peer, if it is that of a message."""
        n, peer = self._engine.alike, side.peer
        if n is None or peer is None:
            return peer
        return self._places[self._members[peer] % n + side.done.owner // n * n]

    def _post(
        self, rank: int, peer: int | None, array: np.ndarray, match: Callable[[_Side], None]
    ) -> Completion:
        side = _Side(array, Completion(self._members[rank]), rank, peer)
        self._engine.spend(side.done.owner, self._processor.call)
        self._engine.post(side.done.owner, lambda: match(side))
        return side.done

    def _deliver(self, send: _Side, receive: _Side) -> None:
        engine = self._engine
        receive.done.source = send.rank

        def arrived() -> None:
            engine.complete(send.done, engine.now)
            engine.complete(receive.done, engine.now)

        sizes = send.array.nbytes, receive.array.nbytes
        if max(sizes) - min(sizes) > (MAX_UNEVEN if engine.alike else 0):
            receive.done.problem = wrong_length(receive.array.nbytes, send.array.nbytes)
            arrived()
            return
        # Both ranks leave their arrays alone until the message is complete, so it is copied here.
        copied, nbytes = slice(min(sizes)), max(sizes)
        receive.array.view(np.uint8)[copied] = send.array.view(np.uint8)[copied]

        owners = send.done.owner, receive.done.owner
        pair = engine.network.pair(owners[0], self._members[send.peer])  # type: ignore[index]
        if pair[0] != pair[1]:  # the network's rate contains copies; they slow down computation
            for owner in owners:
                engine.work(owner, self._processor.copy * nbytes, WAITING)
        if pair[0] == pair[1] or nbytes <= self._processor.eager:
            engine.transfer(pair, nbytes, arrived)
        else:
            self._rendezvous(pair, *owners, nbytes, arrived)

    def _rendezvous(
        self, pair: Pair, sender: int, receiver: int, nbytes: int, arrived: Callable[[], None]
    ) -> None:
        """Let a message start when the receiver, then the sender, are in calls; send its parts."""
        engine, notice = self._engine, self._processor.notice
        latency, window = engine.network.routes[pair].latency, int(WINDOW * self._processor.eager)

        def announce() -> None:
            engine.attend(receiver, consent, notice)

        def consent() -> None:
            call = partial(engine.attend, sender, partial(send, nbytes), notice)
            engine.at(engine.now + latency, call)

        def send(left: int) -> None:
            rest = max(left - window, 0)
            then = partial(engine.attend, sender, partial(send, rest)) if rest else arrived
            engine.transfer(pair, left - rest, then, follows=left < nbytes)

        engine.at(engine.now + latency, announce)
