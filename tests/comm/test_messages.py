"""Communicators report every message to an observer."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pydtnn.comm import Serial
from pydtnn.utils.observer import Kind, Observer


class Log(Observer):
    """Keeps messages, and activities with their bytes."""

    def __init__(self) -> None:
        self.messages: list[tuple[Kind, str, int, int, int]] = []
        self.times: list[tuple[int, int]] = []
        self.activities: list[tuple[Kind, str, int]] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self.activities.append((kind, name, nbytes))

    def message(
        self, kind: Kind, name: str, start: int, stop: int, *, peer: int, tag: int, nbytes: int
    ) -> None:
        self.messages.append((kind, name, peer, tag, nbytes))
        self.times.append((start, stop))


@pytest.mark.threads(2)
@pytest.mark.mpi(2)
def test_a_message_is_reported_once_by_both_ranks(comm):
    log, other = Log(), 1 - comm.rank
    comm.observe(log)
    before = time.perf_counter_ns()
    out, into = np.zeros(5), np.empty(5)
    receive, send = comm.irecv(into, other, tag=7), comm.isend(out, other, tag=7)
    while not receive.test():
        time.sleep(0)
    receive.wait()  # again
    assert receive.test()
    send.wait()
    comm.observe(None)
    comm.exchange([(out, other)], [(into, other)]).wait()  # is not reported any more
    after = time.perf_counter_ns()
    (received, sent) = log.messages
    name = received[1]
    assert received == (Kind.RECEIVED, name, other, 7, 40)
    assert sent == (Kind.SENT, name, other, 7, 40)
    assert comm.gather_object(name) == [name] * 2
    for start, stop in log.times:
        assert before <= start <= stop <= after


@pytest.mark.threads(4)
@pytest.mark.mpi(4)
def test_messages_of_groups_have_their_name_and_the_first_numbers_of_ranks(comm):
    """The halves are numbered backwards; rank r's partner is r ^ 1."""
    log, partner = Log(), comm.rank ^ 1
    with comm.split(comm.rank // 2, -comm.rank) as half:
        for observing in (comm, half):
            observing.observe(log)
            half.exchange([(np.zeros(3), 1 - half.rank)], [(np.empty(3), 1 - half.rank)]).wait()
        # A message to a rank outside of the observed group has its number, too.
        requests = [comm.isend(np.zeros(1), comm.rank ^ 2), comm.irecv(np.empty(1), comm.rank ^ 2)]
        for request in requests:
            request.wait()
        half.observe(None)
    outside = [m for m in log.messages if m[2] == comm.rank ^ 2]
    inside = [m for m in log.messages if m not in outside]
    assert (len(outside), [peer for _, _, peer, _, _ in inside]) == (2, [partner] * 4)
    names = comm.gather_object({name for _, name, _, _, _ in inside})
    assert all(len(own) == 1 for own in names)
    assert names[comm.rank] == names[partner] != names[comm.rank ^ 2]


@pytest.mark.threads(2)
def test_calls_are_reported_with_the_bytes_that_are_counted_and_waits_without(comm):
    log, other = Log(), 1 - comm.rank
    comm.traffic.observer = log
    comm.iallreduce(np.zeros(4)).wait()
    comm.exchange([(np.zeros(2), other)] * 2, [(np.empty(2), other)] * 2).wait()
    receive = comm.irecv(np.empty(1), other)
    comm.isend(np.zeros(1), other).wait()
    receive.wait()
    comm.barrier()
    with comm.split(0) as group:
        group.broadcast(np.zeros(2))
    assert log.activities == [
        (Kind.CALL, "iallreduce", 32),
        (Kind.WAIT, "iallreduce", 0),
        (Kind.CALL, "exchange", 32),
        (Kind.WAIT, "exchange", 0),
        (Kind.CALL, "irecv", 0),
        (Kind.CALL, "isend", 8),
        (Kind.WAIT, "isend", 0),
        (Kind.WAIT, "irecv", 0),
        (Kind.CALL, "barrier", 0),
        (Kind.CALL, "split", 0),
        (Kind.CALL, "broadcast", 8),
    ]
    assert sum(nbytes for _, _, nbytes in log.activities) == comm.traffic.bytes


def test_a_communicator_of_one_rank_has_no_messages_and_repeats_what_is_counted_apart():
    log, comm = Log(), Serial()
    comm.observe(log)
    receive = comm.irecv(np.empty(1), 0)
    comm.send(np.zeros(1), 0)
    receive.wait()
    assert not log.messages
    before, log.activities = comm.traffic.bytes, []
    comm.traffic.observer = log
    with comm.traffic.apart() as part:
        comm.traffic.count(24)
        comm.barrier()
    assert not log.activities
    comm.traffic.repeat(part)
    comm.traffic.repeat(part)
    assert log.activities == [(Kind.CALL, "replay", 24)] * 2
    assert comm.traffic.bytes == before + 48
