"""What a rank has said is counted: each way by its own rule, rounds by message, groups too."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm.traffic import Traffic


@pytest.mark.threads(2)
def test_what_is_counted_apart_is_added_as_often_as_it_is_repeated(comm):
    comm.allreduce(np.zeros(5))
    with comm.traffic.apart() as said:
        comm.allreduce(np.zeros(3))
        comm.allreduce(np.zeros(4))
    assert (said.messages, said.bytes) == (2, 56)
    assert (comm.traffic.messages, comm.traffic.bytes) == (1, 40)
    for _ in range(3):
        comm.traffic.repeat(said)
    assert (comm.traffic.messages, comm.traffic.bytes) == (7, 40 + 3 * 56)


def test_an_error_leaves_the_counts_as_they_were():
    traffic = Traffic(messages=1, bytes=8)

    def fail() -> None:
        traffic.count(16)
        raise KeyError

    with pytest.raises(KeyError), traffic.apart() as said:
        fail()
    assert (traffic.messages, traffic.bytes) == (1, 8)
    assert (said.messages, said.bytes) == (1, 16)
