"""What a rank has said is counted: each way by its own rule, rounds by message, groups too."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.comm.metered import Metered, Traffic


@pytest.mark.threads(3)
def test_every_way_counts_the_bytes_that_a_rank_must_send(comm: Communicator) -> None:
    counted = Metered(comm)
    x, out = np.zeros(30), np.zeros(10)  # 240 B, 80 B
    for call, sent in (
        (lambda: counted.allreduce(x), 320),
        (lambda: counted.iallreduce(x).wait(), 320),
        (lambda: counted.broadcast(x), 160),
        (lambda: counted.reduce_scatter(x, [10, 10, 10], out), 160),
        (lambda: counted.allgather(out, [10, 10, 10], x), 160),
        (lambda: counted.barrier(), None),
    ):
        before = counted.traffic.messages, counted.traffic.bytes
        call()
        said = counted.traffic.messages - before[0], counted.traffic.bytes - before[1]
        assert said == ((0, 0) if sent is None else (1, sent))


@pytest.mark.threads(3)
def test_a_round_counts_the_messages_that_are_sent_and_groups_count_there_too(
    comm: Communicator,
) -> None:
    counted = Metered(comm)
    group = counted.split(0)
    others = [rank for rank in range(3) if rank != comm.rank]
    for one in (counted, group):
        receives = [(np.empty(4), rank) for rank in others]
        one.exchange([(np.zeros(4), rank) for rank in others], receives).wait()
    assert (counted.traffic.messages, counted.traffic.bytes) == (4, 4 * 32)
    assert counted.traffic.seconds > 0


@pytest.mark.threads(2)
def test_what_is_counted_apart_is_added_as_often_as_it_is_repeated(comm: Communicator) -> None:
    counted = Metered(comm)
    counted.allreduce(np.zeros(5))
    with counted.traffic.apart() as said:
        counted.allreduce(np.zeros(3))
        counted.allreduce(np.zeros(4))
    assert (said.messages, said.bytes) == (2, 56)
    assert (counted.traffic.messages, counted.traffic.bytes) == (1, 40)
    for _ in range(3):
        counted.traffic.repeat(said)
    assert (counted.traffic.messages, counted.traffic.bytes) == (7, 40 + 3 * 56)


def test_an_error_leaves_the_counts_as_they_were() -> None:
    traffic = Traffic(messages=1, bytes=8)
    said = Traffic()

    def fail() -> None:
        nonlocal said
        with traffic.apart() as said:
            traffic.count(16)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (traffic.messages, traffic.bytes) == (1, 8)
    assert (said.messages, said.bytes) == (1, 16)
