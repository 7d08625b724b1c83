"""Communicators report every message to an observer."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
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
def test_a_message_is_reported_once_by_both_ranks(comm: Communicator) -> None:
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
def test_messages_of_groups_have_their_name_and_the_first_numbers_of_ranks(
    comm: Communicator,
) -> None:
    """The halves are numbered backwards; rank r's partner is r ^ 1."""
    log, partner = Log(), comm.rank ^ 1
    with comm.split(comm.rank // 2, -comm.rank) as half:
        comm.observe(log)
        half.exchange([(np.zeros(3), 1 - half.rank)], [(np.empty(3), 1 - half.rank)]).wait()
        half.observe(log)
        half.exchange([(np.zeros(3), 1 - half.rank)], [(np.empty(3), 1 - half.rank)]).wait()
        half.observe(None)
        members = [int(rank) for rank in half.members]
    first, second = comm.rank // 2 * 2, comm.rank // 2 * 2 + 1
    assert len(members) == 2
    assert [peer for _, _, peer, _, _ in log.messages] == [partner] * 4
    names = comm.gather_object({name for _, name, _, _, _ in log.messages})
    assert all(len(own) == 1 for own in names)
    assert names[first] == names[second]
    assert names[0] != names[2]


@pytest.mark.threads(3)
def test_a_message_to_a_rank_outside_of_the_observed_group_has_its_number(
    comm: Communicator,
) -> None:
    log = Log()
    with comm.split(int(comm.rank == 2)) as group:
        group.observe(log)
        if comm.rank == 0:
            comm.send(np.zeros(1), 2)
        elif comm.rank == 2:
            comm.recv(np.empty(1), 0)
        group.observe(None)
    assert [peer for _, _, peer, _, _ in log.messages] == {0: [2], 1: [], 2: [0]}[comm.rank]


@pytest.mark.threads(2)
def test_calls_are_reported_with_the_bytes_that_are_counted_and_waits_without(
    comm: Communicator,
) -> None:
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


def test_what_is_counted_apart_is_reported_when_it_is_repeated() -> None:
    log, counted = Log(), Serial()
    counted.traffic.observer = log
    with counted.traffic.apart() as part:
        counted.traffic.count(24)
        counted.barrier()
    assert not log.activities
    counted.traffic.repeat(part)
    counted.traffic.repeat(part)
    assert log.activities == [(Kind.CALL, "replay", 24)] * 2
    assert counted.traffic.bytes == 48


def test_a_communicator_of_one_rank_has_no_messages() -> None:
    log, comm = Log(), Serial()
    comm.observe(log)
    receive = comm.irecv(np.empty(1), 0)
    comm.send(np.zeros(1), 0)
    receive.wait()
    assert not log.messages
