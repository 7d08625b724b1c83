"""The activities and messages of all ranks on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from pydtnn.tools.tracing.records import RankTrace, read_traces
from pydtnn.utils.observer import Kind


def _dtype_of(row: type) -> np.dtype:
    """Return the dtype of a `NamedTuple` whose annotations contain the types of the fields."""
    hints = get_type_hints(row, include_extras=True)
    return np.dtype([(name, hint.__metadata__[0]) for name, hint in hints.items()])


class Message(NamedTuple):
    """An element of an array of `MESSAGE`, whose fields are faster to access one by one."""

    group: Annotated[int, "i4"]  # position of the group's name in `Timeline.names`
    source: Annotated[int, "i4"]
    target: Annotated[int, "i4"]
    tag: Annotated[int, "i4"]
    nbytes: Annotated[int, "i8"]
    epoch: Annotated[int, "i4"]
    step: Annotated[int, "i4"]
    lane: Annotated[int, "u1"]
    start: Annotated[int, "i8"]
    stop: Annotated[int, "i8"]


MESSAGE = _dtype_of(Message)
"""A message as one of its ranks has recorded it."""


@dataclass
class MessageRecords:
    """The messages of all ranks that were recorded by both sides.

    Attributes
    ----------
    sent, received : ndarray of MESSAGE, shape ``(messages,)``
        The same message as its source and its target have recorded it; sorted by the start of the
        sending. Times are in ns of the common clock, counted from the first record.
    unmatched_sent, unmatched_received : ndarray of MESSAGE
        Messages that only one side has recorded, as at the ends of the recorded steps.
    """

    sent: np.ndarray
    received: np.ndarray
    unmatched_sent: np.ndarray
    unmatched_received: np.ndarray

    def __len__(self) -> int:
        return len(self.sent)

    def pairs(self) -> Iterator[tuple[Message, Message]]:
        """Yield each message as its source and as its target have recorded it."""
        sides = (map(Message._make, side.tolist()) for side in (self.sent, self.received))
        return zip(*sides, strict=True)

    @property
    def stop(self) -> np.ndarray:
        """When each was known to be complete on both sides, in ns."""
        return np.maximum(self.sent["stop"], self.received["stop"])


def match_messages(
    ranks: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], origin: int
) -> MessageRecords:
    """Match the messages of all ranks.

    The n-th message from one rank to another in a group with a tag is the n-th received. If one
    side has recorded more of them than the other, this is so within each step.

    Parameters
    ----------
    ranks : sequence of tuples
        For each rank, its records of messages (`RECORD`), the positions of its names in the names
        of all ranks, and starts and stops on the common clock, in ns.
    origin : int
        Time that is subtracted, in ns.
    """
    sent, received = [], []
    for rank, (records, ids, start, stop) in enumerate(ranks):
        messages = np.zeros(len(records), MESSAGE)
        for field in ("tag", "nbytes", "epoch", "step", "lane"):
            messages[field] = records[field]
        messages["group"] = ids[records["name"]] if len(records) else 0
        messages["start"], messages["stop"] = start - origin, stop - origin
        sending = records["kind"] == Kind.SENT
        messages["source"] = np.where(sending, rank, records["peer"])
        messages["target"] = np.where(sending, records["peer"], rank)
        sent.append(messages[sending])
        received.append(messages[~sending])
    return _match(np.concatenate(sent), np.concatenate(received))


def _match(sent: np.ndarray, received: np.ndarray) -> MessageRecords:
    channel = ["group", "source", "target", "tag"]
    first, second = _pair(sent, received, channel)
    # Where the numbers differ, one side has recorded other steps.
    left, right = _without(len(sent), first), _without(len(received), second)
    more, also = _pair(sent[left], received[right], [*channel, "epoch", "step"])
    first, second = np.append(first, left[more]), np.append(second, right[also])
    order = np.argsort(sent["start"][first], kind="stable")
    lonely = sent[_without(len(sent), first)], received[_without(len(received), second)]
    return MessageRecords(sent[first[order]], received[second[order]], *lonely)


def _pair(
    sent: np.ndarray, received: np.ndarray, fields: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the messages whose numbers agree for equal values of the fields."""
    codes = _codes(np.append(sent, received), fields)
    ours, theirs = codes[: len(sent)], codes[len(sent) :]
    length = int(codes.max(initial=-1)) + 1
    equal = np.bincount(ours, minlength=length) == np.bincount(theirs, minlength=length)
    pairs = []
    for messages, code in ((sent, ours), (received, theirs)):
        chosen = np.flatnonzero(equal[code])
        pairs.append(chosen[np.lexsort((messages["start"][chosen], code[chosen]))])
    return pairs[0], pairs[1]


def _codes(messages: np.ndarray, fields: Sequence[str]) -> np.ndarray:
    """Return a number per message, equal for equal values of the fields."""
    codes = np.zeros(len(messages), "i8")
    for field in fields:
        values, positions = np.unique(messages[field], return_inverse=True)
        codes = np.unique(codes * len(values) + positions, return_inverse=True)[1]
    return codes


def _without(length: int, positions: np.ndarray) -> np.ndarray:
    """Return the positions of an array that are not among those given."""
    return np.delete(np.arange(length), positions)


class ActivityRecord(NamedTuple):
    """An element of an array of `ACTIVITY`, whose fields are faster to access one by one."""

    rank: Annotated[int, "i4"]
    lane: Annotated[int, "u1"]  # thread: 0 is the main one
    kind: Annotated[int, "u1"]  # `pydtnn.utils.observer.Kind`
    depth: Annotated[int, "u2"]  # number of activities of the thread that it is nested in
    name: Annotated[int, "i4"]  # position in `Timeline.names`
    epoch: Annotated[int, "i4"]
    step: Annotated[int, "i4"]
    start: Annotated[int, "i8"]  # ns
    stop: Annotated[int, "i8"]  # ns
    own: Annotated[int, "i8"]  # ns that are not in a nested activity
    parent: Annotated[int, "i8"]  # position of the activity that it is nested in; -1 for none
    nbytes: Annotated[int, "i8"]  # B
    bucket: Annotated[int, "i4"]
    group: Annotated[int, "i4"]  # position in `names` of the ranks of a call or wait; -1 for none
    memory: Annotated[int, "i8"]  # B in use by the backend at the end; -1 if unknown


ACTIVITY = _dtype_of(ActivityRecord)
"""An activity. Times are those of rank 0's clock, counted from the first record."""


@dataclass
class Timeline:
    """The traces of all ranks.

    Attributes
    ----------
    names : list of str
        To which the fields `name` refer, for all ranks.
    activities : ndarray of ACTIVITY
        Sorted by rank, thread, start and depth. Messages are in `messages`.
    messages : Messages
    lanes : list of list of str
        Names of the threads of each rank.
    about : list of dict
        `RankTrace.about` of each rank.
    """

    names: list[str]
    activities: np.ndarray
    messages: MessageRecords
    lanes: list[list[str]]
    about: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.about)

    @property
    def duration(self) -> int:
        """Time from the first record to the end of the last, in ns."""
        stops = [
            array.max() for array in (self.activities["stop"], self.messages.stop) if len(array)
        ]
        return int(max(stops, default=0))

    @cached_property
    def steps(self) -> Steps:
        """The training steps that all ranks have recorded."""
        return _find_steps(self)

    def select(self, *, main: bool = False, **fields: int) -> np.ndarray:
        """Return the positions of activities.

        Parameters
        ----------
        main : bool, default False
            Only those of the main thread.
        **fields : int
            Values of fields, such as ``rank=0`` and ``kind=Kind.PHASE``.
        """
        fields |= {"lane": 0} if main else {}
        chosen = np.ones(len(self.activities), bool)
        for field, value in fields.items():
            chosen &= self.activities[field] == value
        return np.flatnonzero(chosen)

    def rows(self, positions: np.ndarray | None = None) -> Iterator[ActivityRecord]:
        """Yield activities, by default all."""
        chosen = self.activities if positions is None else self.activities[positions]
        return (ActivityRecord(*values) for values in chosen.tolist())

    def name_id(self, name: str) -> int:
        """Return the position of a name; -1 if no record has it."""
        return self.names.index(name) if name in self.names else -1

    def title(self, kind: int, name: int) -> str:
        """Return the name of an activity, with its direction if it is a layer."""
        direction = f" ({Kind(kind).name.lower()})" if kind in (Kind.FORWARD, Kind.BACKWARD) else ""
        return self.names[name] + direction

    def ancestor(self, chosen: np.ndarray) -> np.ndarray:
        """Return, for each activity, the innermost one that contains it and is chosen.

        Parameters
        ----------
        chosen : ndarray of bool, shape ``(activities,)``

        Returns
        -------
        ndarray of int, shape ``(activities,)``
            A chosen activity is its own result; -1 if there is none.
        """
        parents = self.activities["parent"]
        found = np.where(chosen, np.arange(len(parents)), -1)
        for depth in range(1, int(self.activities["depth"].max(initial=0)) + 1):
            here = np.flatnonzero((self.activities["depth"] == depth) & (found < 0))
            here = here[parents[here] >= 0]
            found[here] = found[parents[here]]
        return found


@dataclass
class Steps:
    """Training steps. A step begins where the preceding one, or an evaluation, has ended.

    It contains the callbacks and checkpoints after that, then the wait for its batch (phase
    "data"), and ends with its phase "step". The first step that is recorded begins with the wait.

    Attributes
    ----------
    epochs, numbers : ndarray of int, shape ``(steps,)``
        Epoch of each step and its number within the epoch, ascending.
    start, stop : ndarray of int, shape ``(steps, ranks)``
        In ns.
    """

    epochs: np.ndarray
    numbers: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.epochs)

    @property
    def duration(self) -> float:
        """Median of the durations of all steps on all ranks, in ns; 0 without steps."""
        return float(np.median(self.stop - self.start)) if len(self) else 0.0

    def place(self, rank: int, times: np.ndarray) -> np.ndarray:
        """Return the position of the step in which a rank was at each time; -1 outside of steps."""
        found = np.searchsorted(self.start[:, rank], times, side="right") - 1
        inside = (found >= 0) & (times < self.stop[found, rank]) if len(self) else found >= 0
        return np.where(inside, found, -1)


def load_timeline(folder: str | Path) -> Timeline:
    """Read the traces of a folder. Raises ValueError as `read_traces` does."""
    return build_timeline(read_traces(folder))


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """Place the traces of all ranks on the clock of rank 0.

    Parameters
    ----------
    traces : sequence of RankTrace
        In the order of the ranks.
    """
    names: dict[str, int] = {}
    activities, messages = [], []
    for rank, trace in enumerate(traces):
        ids = np.array([names.setdefault(name, len(names)) for name in trace.names], "i4")
        records = trace.records
        start = trace.to_common(records["start"])
        stop = trace.to_common(records["start"] + records["duration"])
        is_message = np.isin(records["kind"], (Kind.SENT, Kind.RECEIVED))
        messages.append((records[is_message], ids, start[is_message], stop[is_message]))
        activities.append(_place(rank, records, ids, start, stop)[~is_message])
    origin = min((int(array["start"].min()) for array in activities if len(array)), default=0)
    origin = min([origin, *(int(start.min()) for _, _, start, _ in messages if len(start))])
    for array in activities:
        array["start"] -= origin
        array["stop"] -= origin
    return Timeline(
        names=list(names),
        activities=_join(activities),
        messages=match_messages(messages, origin),
        lanes=[list(trace.about["lanes"]) for trace in traces],
        about=[trace.about for trace in traces],
    )


def _place(
    rank: int, records: np.ndarray, ids: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Return the activities of a rank, in the order of the records."""
    placed = np.zeros(len(records), ACTIVITY)
    for field in ("lane", "kind", "depth", "epoch", "step", "nbytes", "bucket", "memory"):
        placed[field] = records[field]
    placed["rank"] = rank
    placed["name"] = ids[records["name"]] if len(records) else 0
    called = records["group"] >= 0
    placed["group"] = -1
    placed["group"][called] = ids[records["group"][called]]
    placed["start"], placed["stop"] = start, stop
    return placed


def _join(activities: Sequence[np.ndarray]) -> np.ndarray:
    """Join the activities of all ranks; find parents and the time outside of children."""
    joined = np.concatenate(activities)
    parents = np.full(len(joined), -1)
    lanes = joined["rank"].astype("i8") << 8 | joined["lane"]
    for lane in np.unique(lanes):
        here = np.flatnonzero(lanes == lane)
        depths = joined["depth"][here]
        for depth in range(1, int(depths.max()) + 1):
            children, above = here[depths == depth], here[depths == depth - 1]
            # Records are in the order of their ends, so a parent is the next one of its depth.
            following = np.searchsorted(above, children)
            found = following < len(above)
            children, candidates = children[found], above[following[found]]
            inside = joined["start"][candidates] <= joined["start"][children]
            parents[children[inside]] = candidates[inside]
    nested = np.zeros(len(joined), "i8")
    durations = joined["stop"] - joined["start"]
    np.add.at(nested, parents[parents >= 0], durations[parents >= 0])
    joined["own"] = durations - nested
    order = np.lexsort((joined["depth"], joined["start"], joined["lane"], joined["rank"]))
    position = np.empty(len(joined), "i8")
    position[order] = np.arange(len(joined))
    joined["parent"] = np.where(parents >= 0, position[parents], -1)
    return joined[order]


def _find_steps(timeline: Timeline) -> Steps:
    activities = timeline.activities
    phases = (activities["kind"] == Kind.PHASE) & (activities["lane"] == 0)
    is_step = phases & (activities["name"] == timeline.name_id("step"))
    is_data = phases & (activities["name"] == timeline.name_id("data"))
    # What a step follows; not what a callback or a step itself contains.
    outer = activities["name"][activities["parent"]] == timeline.name_id("epoch")
    outer |= activities["parent"] < 0
    ends = [timeline.name_id(name) for name in ("start", "step", "evaluation")]
    is_end = phases & outer & np.isin(activities["name"], ends)
    found: list[dict[tuple[int, int], tuple[int, int]]] = []
    for rank in range(timeline.size):
        own: dict[tuple[int, int], tuple[int, int]] = {}
        batches = activities[is_data & (activities["rank"] == rank)]
        before = -1
        stops = np.sort(activities["stop"][is_end & (activities["rank"] == rank)])
        for step in activities[is_step & (activities["rank"] == rank)]:
            i = int(np.searchsorted(batches["stop"], step["start"], side="right")) - 1
            follows = i >= 0 and batches["start"][i] >= before
            start = int(batches["start"][i] if follows else step["start"])
            i = int(np.searchsorted(stops, start, side="right")) - 1
            start = int(stops[i]) if i >= 0 else start
            before = int(step["stop"])
            own[int(step["epoch"]), int(step["step"])] = start, before
        found.append(own)
    keys = sorted(set.intersection(*(set(own) for own in found)))
    times = np.array([[own[key] for own in found] for key in keys], "i8")
    times = times.reshape(len(keys), timeline.size, 2)
    numbers = np.array(keys, "i8").reshape(len(keys), 2)
    return Steps(numbers[:, 0], numbers[:, 1], times[..., 0], times[..., 1])
