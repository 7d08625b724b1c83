"""One rank keeps the contract; each call counts what a rank must send, groups too."""

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from tests.comm.communicator_contract import CommunicatorContract


class TestSerial(CommunicatorContract):
    @pytest.fixture
    def comm(self):
        return create_communicator("serial")


@pytest.mark.threads(3)
def test_every_way_counts_the_bytes_that_a_rank_must_send(comm):
    x, out = np.zeros(30), np.zeros(10)  # 240 B, 80 B
    for call, sent in (
        (lambda: comm.allreduce(x), 320),
        (lambda: comm.iallreduce(x).wait(), 320),
        (lambda: comm.broadcast(x), 160),
        (lambda: comm.reduce_scatter(x, [10, 10, 10], out), 160),
        (lambda: comm.allgather(out, [10, 10, 10], x), 160),
        (lambda: comm.barrier(), None),
    ):
        before = comm.traffic.messages, comm.traffic.bytes
        call()
        said = comm.traffic.messages - before[0], comm.traffic.bytes - before[1]
        assert said == ((0, 0) if sent is None else (1, sent))


@pytest.mark.threads(3)
def test_a_round_counts_the_messages_that_are_sent_and_groups_count_there_too(comm):
    group = comm.split(0)
    others = [rank for rank in range(3) if rank != comm.rank]
    for one in (comm, group):
        receives = [(np.empty(4), rank) for rank in others]
        one.exchange([(np.zeros(4), rank) for rank in others], receives).wait()
    assert (comm.traffic.messages, comm.traffic.bytes) == (4, 4 * 32)
    assert comm.traffic.seconds > 0
