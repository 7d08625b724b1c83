"""Labels of activities, and when a rank waits in its communicator for which other rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind

COMMUNICATION = (Kind.CALL, "communication")
"""Label of everything inside of calls and waits."""


@dataclass
class Labels:
    """A label for each activity of the main threads.

    An activity inside of a call or wait has the label `COMMUNICATION`; otherwise that of the
    innermost layer that contains it, or of the innermost phase outside of layers. What an epoch
    contains besides other phases has no label.

    Attributes
    ----------
    table : list of (Kind, str)
        Kind and name of each label; `COMMUNICATION` is the first.
    codes : ndarray of int, shape ``(activities,)``
        Position in `table`; -1 for activities of other threads and outside of phases.
    """

    table: list[tuple[Kind, str]]
    codes: np.ndarray

    def seconds(self, timeline: Timeline) -> np.ndarray:
        """Return the time of each label in each step on each rank.

        Returns
        -------
        ndarray of float, shape ``(labels, steps, ranks)``
            In s; the sum over the labels is the duration of the step without gaps between phases.
        """
        steps, activities = timeline.steps, timeline.activities
        found = np.zeros((len(self.table), len(steps), timeline.size))
        for rank in range(timeline.size):
            here = np.flatnonzero((activities["rank"] == rank) & (self.codes >= 0))
            step = steps.place(rank, activities["start"][here])
            here, step = here[step >= 0], step[step >= 0]
            np.add.at(found[:, :, rank], (self.codes[here], step), activities["own"][here] / 1e9)
        return found


def label(timeline: Timeline) -> Labels:
    """Return the labels of all activities."""
    activities = timeline.activities
    main, kinds = activities["lane"] == 0, activities["kind"]
    inside = main & np.isin(kinds, (Kind.CALL, Kind.WAIT))
    layers = main & np.isin(kinds, (Kind.FORWARD, Kind.BACKWARD))
    phases = main & (kinds == Kind.PHASE) & (activities["name"] != timeline.name_id("epoch"))
    owner = timeline.ancestor(layers)
    owner = np.where(owner >= 0, owner, timeline.ancestor(phases))
    keys = np.where(owner >= 0, kinds[owner].astype("i8") << 32 | activities["name"][owner], -1)
    keys = np.where(timeline.ancestor(inside) >= 0, -2, keys)
    found, codes = np.unique(keys, return_inverse=True)
    table = [COMMUNICATION]
    positions = np.zeros(len(found), "i8")  # of -2: communication
    for i, key in enumerate(found.tolist()):
        if key >= 0:
            positions[i] = len(table)
            table.append((Kind(key >> 32), timeline.names[key & 0xFFFFFFFF]))
        elif key == -1:
            positions[i] = -1
    return Labels(table, positions[codes.reshape(-1)])


def describe_label(kind: Kind, name: str) -> str:
    """Return a label in words, such as "layer conv1 (forward)" or "callback TensorBoard"."""
    if kind in (Kind.FORWARD, Kind.BACKWARD):
        return f"layer {name} ({kind.name.lower()})"
    plain = (kind, name) == COMMUNICATION or name.startswith("callback ")
    return name if plain else f'phase "{name}"'


def excess_over_median(seconds: np.ndarray) -> np.ndarray:
    """Return how much each rank needs beyond the median of the other ranks.

    Parameters
    ----------
    seconds : ndarray of float, shape ``(..., ranks)``

    Returns
    -------
    ndarray of float, the same shape
        0 with one rank.
    """
    size = seconds.shape[-1]
    if size == 1:
        return np.zeros_like(seconds)
    others = [np.median(np.delete(seconds, rank, axis=-1), axis=-1) for rank in range(size)]
    return seconds - np.stack(others, axis=-1)


STARTING = ("iallreduce", "isend", "irecv", "exchange", "test")
"""Operations that return before their messages are complete."""

COLLECTIVE = (
    "allreduce",
    "iallreduce",
    "broadcast",
    "reduce_scatter",
    "allgather",
    "gather_object",
    "barrier",
)
"""Operations in which all ranks of a group take part."""


@dataclass
class Blocks:
    """Calls and waits of the main threads, without those nested in others.

    Attributes
    ----------
    activity : ndarray of int, shape ``(blocks,)``
        Positions in `Timeline.activities`, ascending: sorted by rank and start.
    rank, start, stop : ndarray of int, shape ``(blocks,)``
        Times in ns.
    starting : ndarray of bool, shape ``(blocks,)``
        Whether the call returns before its messages are complete.
    block, peer, posted, ready, done : ndarray of int, shape ``(dependencies,)``
        What a block depends on: `peer` made it possible at `ready`, by sending a message, by being
        ready to receive one or, for a collective call without recorded messages, by entering the
        communicator. The rank posted its side at `posted` and knew of the completion at `done`.
        Sorted by block and `done`. Times in ns.
    message : ndarray of int, shape ``(dependencies,)``
        Position in `Timeline.messages`; -1 for collective calls.
    """

    activity: np.ndarray
    rank: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    starting: np.ndarray
    block: np.ndarray
    peer: np.ndarray
    posted: np.ndarray
    ready: np.ndarray
    done: np.ndarray
    message: np.ndarray

    def __len__(self) -> int:
        return len(self.activity)

    def find(self, rank: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return the block in which each rank was at each time; -1 if it was in none."""
        found = np.full(len(times), -1)
        for one in np.unique(rank):
            here = np.flatnonzero(self.rank == one)
            queries = np.flatnonzero(rank == one)
            position = np.searchsorted(self.start[here], times[queries], side="right") - 1
            inside = position >= 0
            queries, position = queries[inside], here[position[inside]]
            inside = times[queries] <= self.stop[position]
            found[queries[inside]] = position[inside]
        return found

    def waiting(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each block the time before its peers made it possible, and the peers' shares.

        Of several peers, the rank waits for the one that is last.

        Returns
        -------
        ndarray of int, shape ``(blocks,)``
            In ns.
        ndarray of int, shape ``(dependencies,)``
            The part of this time that a dependency accounts for, in ns.
        """
        begin = np.maximum(self.start[self.block], self.posted)
        end = np.minimum(np.minimum(self.ready, self.done), self.stop[self.block])
        shares = np.zeros(len(self.block), "i8")
        late = np.flatnonzero((end > begin) & ~self.starting[self.block])
        # From the last to the first, each accounts for what those after it do not cover.
        late = late[np.lexsort((-end[late], self.block[late]))]
        block, covered = -1, 0
        for i in late:
            if self.block[i] != block:
                block, covered = self.block[i], end[i]
            shares[i] = max(0, min(end[i], covered) - begin[i])
            covered = min(covered, begin[i])
        total = np.zeros(len(self), "i8")
        np.add.at(total, self.block, shares)
        return total, shares


def find_blocks(timeline: Timeline) -> Blocks:
    """Return the blocks of all ranks with their dependencies."""
    activities = timeline.activities
    inside = np.isin(activities["kind"], (Kind.CALL, Kind.WAIT)) & (activities["lane"] == 0)
    outer = activities["parent"]
    nested = np.zeros(len(activities), bool)
    has = outer >= 0
    nested[has] = (timeline.ancestor(inside) >= 0)[outer[has]]
    chosen = np.flatnonzero(inside & ~nested)
    starting = [timeline.name_id(name) for name in STARTING]
    of_start = np.isin(activities["name"][chosen], starting)
    is_call = activities["kind"][chosen] == Kind.CALL
    is_test = activities["name"][chosen] == timeline.name_id("test")
    blocks = Blocks(
        activity=chosen,
        rank=activities["rank"][chosen].astype("i8"),
        start=activities["start"][chosen],
        stop=activities["stop"][chosen],
        starting=of_start & (is_call | is_test),
        **dict.fromkeys(("block", "peer", "posted", "ready", "done", "message"), np.zeros(0, "i8")),
    )
    found = np.concatenate([_of_messages(timeline, blocks), _of_collectives(timeline, blocks)], 1)
    found = found[:, np.lexsort((found[4], found[0]))]
    blocks.block, blocks.peer, blocks.posted, blocks.ready, blocks.done, blocks.message = found
    return blocks


def _of_messages(timeline: Timeline, blocks: Blocks) -> np.ndarray:
    """Return block, peer, posted, ready, done, message of the messages that end in blocks.

    A message that is received depends on when it was sent. One that is sent may complete only when
    the other rank is ready to receive it; this is assumed if it was not complete before.
    """
    sent, received = timeline.messages.sent, timeline.messages.received
    found = []
    for own, other, rank, peer in (
        (received, sent, "target", "source"),
        (sent, received, "source", "target"),
    ):
        block = blocks.find(own[rank], own["stop"])
        chosen = (block >= 0) & (own["lane"] == 0)
        if own is sent:
            chosen &= (other["start"] > own["start"]) & (other["start"] <= own["stop"])
        here = np.flatnonzero(chosen)
        columns = (own[peer], own["start"], other["start"], own["stop"])
        found.append(np.array([block[here], *(column[here] for column in columns), here], "i8"))
    return np.concatenate(found, axis=1)


def _of_collectives(timeline: Timeline, blocks: Blocks) -> np.ndarray:
    """Return the same for collective calls during which no message was recorded.

    The n-th call of an operation of a group in a step is the same operation on all ranks of the
    group, those that have recorded calls of it, if all make as many and no rank leaves it before
    the last has entered it. It depends on the rank that entered the communicator last before its
    end.
    """
    names = timeline.activities["name"][blocks.activity]
    kinds = timeline.activities["kind"][blocks.activity]
    groups = timeline.activities["group"][blocks.activity]
    empty = np.ones(len(blocks), bool)
    touched = np.append(
        blocks.find(timeline.messages.received["target"], timeline.messages.received["stop"]),
        blocks.find(timeline.messages.sent["source"], timeline.messages.sent["start"]),
    )
    empty[touched[touched >= 0]] = False
    found = []
    for group in np.unique(groups):
        members = np.unique(blocks.rank[groups == group])
        for name in COLLECTIVE:
            chosen = (names == timeline.name_id(name)) & (groups == group)
            calls = _grid(timeline, blocks, np.flatnonzero(chosen & (kinds == Kind.CALL)), members)
            ends = calls
            if name in STARTING:
                waits = np.flatnonzero(chosen & (kinds == Kind.WAIT))
                ends = _grid(timeline, blocks, waits, members)
            if calls is None or ends is None or calls.shape != ends.shape:
                continue
            last = blocks.start[calls].max(axis=1)
            valid = blocks.stop[ends].min(axis=1) >= last
            valid &= empty[calls].all(axis=1) & empty[ends].all(axis=1)
            calls, ends = calls[valid], ends[valid]
            for place in range(len(members)):
                entered = _last_entries(blocks, ends, members, place)
                entered[:, place] = -1
                last_place = entered.argmax(axis=1)
                ready = entered[np.arange(len(last_place)), last_place]
                posted, done = blocks.start[calls[:, place]], blocks.stop[ends[:, place]]
                peer, message = members[last_place], np.full(len(last_place), -1)
                found.append(np.stack([ends[:, place], peer, posted, ready, done, message]))
    return np.concatenate([np.zeros((6, 0), "i8"), *found], axis=1)


def _last_entries(blocks: Blocks, ends: np.ndarray, members: np.ndarray, place: int) -> np.ndarray:
    """Return when each rank entered the communicator last before an operation ended on one rank.

    MPI's collective operations progress only while their ranks are inside of the communicator.

    Parameters
    ----------
    blocks : Blocks
    ends : ndarray of int, shape ``(operations, members)``
        The blocks in which the operations end.
    members : ndarray of int, shape ``(members,)``
        The ranks of the group.
    place : int
        Position of the one rank in `members`.

    Returns
    -------
    ndarray of int, shape ``(operations, members)``
    """
    entered = np.empty_like(ends)
    for other, rank in enumerate(members):
        starts = blocks.start[blocks.rank == rank]
        limit = np.minimum(blocks.stop[ends[:, place]], blocks.start[ends[:, other]])
        entered[:, other] = starts[np.searchsorted(starts, limit, side="right") - 1]
    return entered


def _grid(
    timeline: Timeline, blocks: Blocks, chosen: np.ndarray, members: np.ndarray
) -> np.ndarray | None:
    """Return the n-th block of each rank of a group in each step, ``(operations, members)``.

    Only steps in which all of them have as many.
    """
    activities = timeline.activities[blocks.activity[chosen]]
    keys = np.stack([activities[field].astype("i8") for field in ("epoch", "step")])
    _, codes = np.unique(keys, axis=1, return_inverse=True)
    codes = codes.reshape(-1)
    counts = np.zeros((len(members), codes.max(initial=-1) + 1), "i8")
    np.add.at(counts, (np.searchsorted(members, blocks.rank[chosen]), codes), 1)
    equal = (counts == counts[0]).all(axis=0) & (len(members) > 1)
    if not equal.any():
        return None
    kept = equal[codes]
    chosen, codes = chosen[kept], codes[kept]
    order = np.lexsort((blocks.start[chosen], codes, blocks.rank[chosen]))
    return chosen[order].reshape(len(members), -1).T
