"""Messages: which one was sent as which one that was received."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pydtnn.utils.observer import Kind

MESSAGE = np.dtype(
    [
        ("group", "i4"),  # position of the group's name in `Timeline.names`
        ("source", "i4"),
        ("target", "i4"),
        ("tag", "i4"),
        ("nbytes", "i8"),
        ("epoch", "i4"),
        ("step", "i4"),
        ("lane", "u1"),
        ("start", "i8"),
        ("stop", "i8"),
    ]
)
"""A message as one of its ranks has recorded it."""


class Message(NamedTuple):
    """A message with the fields of `MESSAGE`, which are faster to access one by one."""

    group: int
    source: int
    target: int
    tag: int
    nbytes: int
    epoch: int
    step: int
    lane: int
    start: int
    stop: int


@dataclass
class Messages:
    """The messages of all ranks that were recorded by both sides.

    Attributes
    ----------
    sent, received : ndarray of MESSAGE, shape ``(messages,)``
        The same message as its source and its target have recorded it; sorted by the start of the
        sending. Times are in ns of the common clock, counted from the first record.
    unmatched_sent, unmatched_received : ndarray of MESSAGE
        Messages that only one side has recorded, as at the ends of ``--trace-steps``.
    """

    sent: np.ndarray
    received: np.ndarray
    unmatched_sent: np.ndarray
    unmatched_received: np.ndarray

    def __len__(self) -> int:
        return len(self.sent)

    def pairs(self) -> Iterator[tuple[Message, Message]]:
        """Yield each message as its source and as its target have recorded it."""
        return zip(message_rows(self.sent), message_rows(self.received), strict=True)

    @property
    def stop(self) -> np.ndarray:
        """When each was known to be complete on both sides, in ns."""
        return np.maximum(self.sent["stop"], self.received["stop"])


def message_rows(messages: np.ndarray) -> Iterator[Message]:
    """Yield the elements of an array of `MESSAGE`."""
    return (Message(*values) for values in messages.tolist())


def match_messages(
    ranks: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], origin: int
) -> Messages:
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


def _match(sent: np.ndarray, received: np.ndarray) -> Messages:
    channel = ["group", "source", "target", "tag"]
    first, second = _pair(sent, received, channel)
    # Where the numbers differ, one side has recorded other steps.
    left, right = _without(len(sent), first), _without(len(received), second)
    more, also = _pair(sent[left], received[right], [*channel, "epoch", "step"])
    first, second = np.append(first, left[more]), np.append(second, right[also])
    order = np.argsort(sent["start"][first], kind="stable")
    lonely = sent[_without(len(sent), first)], received[_without(len(received), second)]
    return Messages(sent[first[order]], received[second[order]], *lonely)


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
