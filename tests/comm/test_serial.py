"""Messages of one rank to itself."""

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from tests.each import each


@each("call", ["send", "recv"])
def test_a_blocking_message_to_oneself_is_refused_because_it_would_wait_for_ever(call):
    comm = create_communicator("serial")
    with pytest.raises(RuntimeError, match="a message to itself"):
        getattr(comm, call)(np.zeros(3), 0)


def test_a_message_to_oneself_arrives_where_both_sides_are_posted():
    comm = create_communicator("serial")
    out = np.zeros(3)
    request = comm.irecv(out, 0)
    assert not request.test()
    comm.send(np.arange(3.0), 0)
    assert request.test()
    np.testing.assert_array_equal(out, [0, 1, 2])
