"""Execution of the nodes of an execution trace by ranks: their times on a network."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from pydtnn.comm import Communicator, Request
from pydtnn.tools.tracing.chakra import Collective, Node, NodeType, dependents
from pydtnn.utils import clock
from pydtnn.utils.request import Together

MAX_GROUPS = 1000
"""Number of groups of ranks."""

AHEAD = 4
"""Messages from a rank with a tag that are received before their nodes begin."""

TESTED = 32
"""Requests that are tested at a time."""

TAGS = 1 << 15
"""Number of tags of messages."""

TO_ALL = (
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER_BLOCK,
)
"""Collectives in which each rank sends to each other."""

WHOLE = (Collective.ALL_GATHER, Collective.BROADCAST, Collective.GATHER, Collective.REDUCE)
"""Collectives of messages of the length `comm_size`; those of the others are a part of it."""

FROM_ROOT = (Collective.BROADCAST, Collective.SCATTER)
"""Collectives in which the first rank of the group sends to the others."""


def groups_of(ranks: Sequence[Sequence[Node]]) -> list[dict[str, tuple[int, ...]]]:
    """Return for each rank the members of its groups, by the name in `pg_name`.

    They are read from the nodes of PyTorch that define them. A group without definition has the
    ranks with collectives of its name.
    """
    used: dict[str, list[int]] = {}
    known: list[dict[str, tuple[int, ...]]] = [{} for _ in ranks]
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            if node.type == NodeType.METADATA and "process_group" in node.name:
                known[rank] |= _defined(node, len(ranks))
        names = [_group(node) for node in nodes if node.type == NodeType.COMM_COLL]
        for name in {*names} - known[rank].keys():
            used.setdefault(name, []).append(rank)
    for rank, own in enumerate(known):
        own.update((name, tuple(found)) for name, found in used.items() if rank in found)
        own[""] = tuple(range(len(ranks)))
    if len({members for own in known for members in own.values()}) > MAX_GROUPS:
        raise ValueError(f"trace import: expected at most {MAX_GROUPS} groups of ranks, got more")
    return known


def _group(node: Node) -> str:
    return str(node.attributes.get("pg_name") or "")


def _defined(node: Node, size: int) -> dict[str, tuple[int, ...]]:
    """Return the members of the groups that a node defines; no ranks are all."""
    text = node.values.replace("\\", "").strip("[]'\" ")  # a list with one text, which is a list
    try:
        found = {
            str(one["pg_name"]): tuple(sorted({*map(int, one["ranks"])})) or tuple(range(size))
            for one in json.loads(f"[{text}]")
        }
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return {
        name: members for name, members in found.items() if 0 <= members[0] <= members[-1] < size
    }


def execute(
    comm: Communicator,
    ranks: Sequence[Sequence[Node]],
    groups: Sequence[dict[str, tuple[int, ...]]],
    spend: Callable[[float], None],
) -> tuple[float, float]:
    """Execute the nodes of this rank. Collective: all ranks call it.

    A node begins when those that it depends on are complete. The operations of the host
    (`is_cpu_op`), the others and accesses to memory are computed at the same time, each kind one
    node after the other in the order of their ids. Communication begins when it can, but not before
    the end of a computation that is in progress: it progresses in calls. A sum follows the
    algorithms of the communicator; the other collectives are messages between all ranks, or from or
    to the first rank of the group. A message is sent whether or not the node that receives it has
    begun: up to `AHEAD` of each rank and tag are received before.

    Parameters
    ----------
    comm : Communicator
        Of all ranks.
    ranks : sequence of sequence of Node
    groups : sequence of dict
        See `groups_of`.
    spend : callable
        Advances the clock of the calling rank by a time in s.

    Returns
    -------
    tuple of float
        Time until the last node is complete, and of this the time of computation, in s.
    """
    return _Execution(comm, ranks, groups, spend).run()


class _Execution:
    def __init__(
        self,
        comm: Communicator,
        ranks: Sequence[Sequence[Node]],
        groups: Sequence[dict[str, tuple[int, ...]]],
        spend: Callable[[float], None],
    ) -> None:
        self.comm, self.spend = comm, spend
        self.nodes = {node.id: node for node in ranks[comm.rank]}
        self.groups = groups[comm.rank]
        self.after, self.missing = dependents(ranks[comm.rank])
        self.ready = sorted(one for one, count in self.missing.items() if not count)
        self.queues: dict[str, list[int]] = {}
        self.running: dict[str, tuple[float, int]] = {}
        self.pending: deque[tuple[Request, int]] = deque()
        self.left = len(self.nodes)
        largest = max(_size(node) for nodes in ranks for node in nodes)
        self.zeros = np.zeros(largest, "uint8")
        self.received: dict[tuple[int, int], deque[Request]] = {}
        self.arrivals: dict[tuple[int, int], deque[int]] = {}
        for node in sorted(ranks[comm.rank], key=lambda node: node.id):
            if node.type == NodeType.COMM_RECV and node.communicates:
                channel = node.attributes["comm_src"], node.attributes["comm_tag"] % TAGS
                self.arrivals.setdefault(channel, deque()).append(_size(node))
        self.comms: dict[tuple[int, ...], Communicator] = {}
        for members in sorted({own for named in groups for own in named.values()}):
            part = comm.split(0 if comm.rank in members else 1 + comm.rank)
            self.comms[members] = part

    def run(self) -> tuple[float, float]:
        for channel in self.arrivals:
            for _ in range(AHEAD):
                self._receive(channel)
        self.comm.barrier()
        start, computed = clock.now(), 0.0
        while self.left:
            while self.ready:
                self._start(self.nodes[heapq.heappop(self.ready)])
            for kind, queue in self.queues.items():
                if queue and kind not in self.running:
                    node = self.nodes[heapq.heappop(queue)]
                    self.running[kind] = clock.now() + 1e-6 * node.duration, node.id
            if self.running:
                end, kind = min((end, kind) for kind, (end, _) in self.running.items())
                rest = max(end - clock.now(), 0.0)
                self.spend(rest)
                computed += rest
                self._finish(self.running.pop(kind)[1])
                self._test()
            elif self.pending and not self._test():
                clock.current().pause()
        return clock.now() - start, computed

    def _receive(self, channel: tuple[int, int]) -> None:
        """Start to receive the next message from a rank with a tag, if there is one."""
        if self.arrivals[channel]:
            array = self.zeros[: self.arrivals[channel].popleft()]
            self.received.setdefault(channel, deque()).append(self.comm.irecv(array, *channel))

    def _start(self, node: Node) -> None:
        if node.communicates:
            self.pending.append((self._communicate(node), node.id))
        elif node.type in (NodeType.INVALID, NodeType.METADATA):
            self._finish(node.id)
        else:
            kind = "host" if node.attributes.get("is_cpu_op") else "device"
            kind = "memory" if node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE) else kind
            heapq.heappush(self.queues.setdefault(kind, []), node.id)

    def _finish(self, one: int) -> None:
        self.left -= 1
        for other in self.after[one]:
            self.missing[other] -= 1
            if not self.missing[other]:
                heapq.heappush(self.ready, other)

    def _test(self) -> bool:
        """Test some requests; return whether one of them is complete."""
        found = False
        for _ in range(min(TESTED, len(self.pending))):
            request, one = self.pending.popleft()
            if request.test():
                self._finish(one)
                found = True
            else:
                self.pending.append((request, one))
        return found

    def _communicate(self, node: Node) -> Request:
        given, array = node.attributes, self.zeros[: _size(node)]
        if node.type == NodeType.COMM_SEND:
            return self.comm.isend(array, given["comm_dst"], given["comm_tag"] % TAGS)
        if node.type == NodeType.COMM_RECV:
            channel = given["comm_src"], given["comm_tag"] % TAGS
            self._receive(channel)
            return self.received[channel].popleft()
        comm, kind = self.comms[self.groups[_group(node)]], given["comm_type"]
        if kind in (Collective.ALL_REDUCE, Collective.BARRIER):
            return comm.iallreduce(array.view("float32"))
        part = array if kind in WHOLE else array[: len(array) // comm.size]
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        if kind not in TO_ALL:
            others = others if comm.rank == 0 else [0]
        sends = kind in TO_ALL or (comm.rank == 0) == (kind in FROM_ROOT)
        receives = kind in TO_ALL or not sends
        requests = [comm.irecv(part, rank) for rank in others if receives]
        return Together([*requests, *(comm.isend(part, rank) for rank in others if sends)])


def _size(node: Node) -> int:
    """Return the length of the array of a node in B, in whole numbers of float32 for sums."""
    given = node.attributes
    if not node.communicates:
        return 4
    size = given["comm_size"]
    is_sum = node.type == NodeType.COMM_COLL and given["comm_type"] in (
        Collective.ALL_REDUCE,
        Collective.BARRIER,
    )
    return max(4 * -(-size // 4), 4) if is_sum else size
