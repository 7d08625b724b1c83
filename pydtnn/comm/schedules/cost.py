"""Predicted time of a schedule on a network: the rounds of all ranks, simulated as flows on links.

The simulation is event-driven. A message starts when both ranks have reached it; after the latency
of its route its bytes flow, at a rate that changes whenever another message starts or ends. A
rank's round ends when its messages have ended and it has added the received values. As in the
executor, ranks cut long arrays into chunks, each of which passes through the rounds by itself, and
process as many of them concurrently as the executor would (`chunks`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from math import inf

from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.comm.schedules.executor import CHUNK_BYTES, chunks_in_flight, pieces
from pydtnn.comm.schedules.flows import Flows
from pydtnn.comm.schedules.network import Network
from pydtnn.comm.schedules.timeline import timeline


def cost(
    algorithm: str | Algorithm,
    nbytes: int,
    network: Network,
    chunk_bytes: int = CHUNK_BYTES,
    active: int | None = None,
) -> float:
    """Predict the time that an allreduce takes, in s.

    Parameters
    ----------
    algorithm : str or Algorithm
        A name of `SCHEDULES`, or a user-defined generator function.
    nbytes : int
        Size of the array, in B.
    network : Network
        Network with the hosts of all ranks.
    chunk_bytes : int
        Length of the chunks that long arrays are cut into, in B.
    active : int, optional
        Chunks of the array in progress at the same time; by default `chunks_in_flight`.

    Returns
    -------
    float
        Time from the simultaneous start of all ranks to the end of the last one, in s.

    Raises
    ------
    ScheduleError
        If a send or a receive has no match, or ranks deadlock.

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005,
    section 3: latency, bandwidth and time to add, for messages that do not share links.

    Examples
    --------
    >>> network = Network.create("abcd", latency=1e-4, bandwidth=1e8)
    >>> round(cost("ring", 4_000_000, network), 6)  # 2 (P-1) (1e-4 + 1e6 / 1e8)
    0.0606
    """
    active = active or chunks_in_flight(network.hosts)
    return _Replay(algorithm, nbytes, network, pieces(nbytes, chunk_bytes), active).run()


Journey = tuple[int, int]
"""A rank and one of its chunks."""


class _Replay:
    """State of the simulation: the current round of each chunk on each rank."""

    def __init__(
        self, algorithm: str | Algorithm, nbytes: int, network: Network, chunks: int, active: int
    ) -> None:
        hosts = network.hosts
        plan = [rounds(algorithm, rank, hosts) for rank in range(len(hosts))]
        self.network = network
        self.messages = timeline(plan).messages
        whole = nbytes / chunks
        self.nbytes = [whole * float(m.part.stop - m.part.start) for m in self.messages]
        self.routes = [network.pair(m.sender, m.receiver) for m in self.messages]
        self.talk: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, message in enumerate(self.messages):
            self.talk[message.sender, message.sent].append(index)
            self.talk[message.receiver, message.received].append(index)
        self.rounds = [len(steps) for steps in plan]
        self.chunks = chunks
        self.active = active
        self.started = [0] * len(hosts)  # number of chunks started by each rank
        self.round: dict[Journey, int] = {}
        self.open: dict[Journey, int] = {}  # number of incomplete messages of a round
        self.to_add: dict[Journey, float] = defaultdict(float)  # bytes received in a round
        self.come: Counter[tuple[int, int]] = Counter()  # number of ranks that reached a message
        self.free = [0.0] * len(hosts)  # time at which a rank completes its pending additions
        self.starts: list[tuple[float, int, int]] = []  # time, message, chunk
        self.ready: list[tuple[float, int, int]] = []  # time, rank, chunk

    def run(self) -> float:
        """Return the time when the last rank has ended its last round."""
        flows = Flows(self.network)
        now = 0.0
        for rank in range(len(self.rounds)) if self.messages else ():
            for _ in range(self.active):
                self._start(rank, now)
        while True:
            queued = [queue[0][0] for queue in (self.starts, self.ready) if queue]
            first = min([flows.next_end(), *queued])
            if first == inf:
                return now
            now = first
            for index, chunk in flows.end(now):
                self._end(index, chunk, now)
            while self.ready and self.ready[0][0] <= now:
                _, rank, chunk = heapq.heappop(self.ready)
                self._next_round(rank, chunk, now)
            while self.starts and self.starts[0][0] <= now:
                _, index, chunk = heapq.heappop(self.starts)
                flows.start(now, self.routes[index], self.nbytes[index], (index, chunk))

    def _start(self, rank: int, now: float) -> None:
        """Start the next chunk of a rank, if there is one."""
        chunk = self.started[rank]
        if chunk < self.chunks:
            self.started[rank] += 1
            self.round[rank, chunk] = -1
            self._next_round(rank, chunk, now)

    def _next_round(self, rank: int, chunk: int, now: float) -> None:
        """Start the next round that is not empty, or else the next chunk."""
        journey = rank, chunk
        talk: list[int] = []
        while not talk:
            self.round[journey] += 1
            if self.round[journey] >= self.rounds[rank]:
                self._start(rank, now)
                return
            talk = self.talk[rank, self.round[journey]]
        self.open[journey] = len(talk)
        for index in talk:
            self.come[index, chunk] += 1
            if self.come[index, chunk] == 2:
                latency = self.network.routes[self.routes[index]].latency
                heapq.heappush(self.starts, (now + latency, index, chunk))

    def _end(self, index: int, chunk: int, now: float) -> None:
        """End a message; a rank whose round has no more open messages adds the received values."""
        message = self.messages[index]
        if message.op == "sum":
            self.to_add[message.receiver, chunk] += self.nbytes[index]
        for rank in (message.sender, message.receiver):
            journey = rank, chunk
            self.open[journey] -= 1
            if not self.open[journey]:
                work = self.to_add.pop(journey, 0.0) * self.network.add
                if work:
                    self.free[rank] = max(self.free[rank], now) + work
                heapq.heappush(self.ready, (self.free[rank] if work else now, rank, chunk))
