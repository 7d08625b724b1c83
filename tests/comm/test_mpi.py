"""The communicator over MPI keeps the contract in worlds of 1 to 4 ranks."""

import numpy as np
import pytest

from tests.comm.communicator_contract import CommunicatorContract


@pytest.mark.mpi
class TestMpi(CommunicatorContract):
    pass


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x: comm.allreduce(x),
        lambda comm, x: comm.iallreduce(x),
        lambda comm, x: comm.reduce_scatter(x, [1] * comm.size, np.empty(1)),
    ],
    ids=["allreduce", "iallreduce", "reduce_scatter"],
)
def test_elements_that_the_library_cannot_reduce_are_refused_in_a_sentence(comm, monkeypatch, call):
    # Every library at hand can reduce float16, so it is made to try what no library can.
    monkeypatch.setitem(comm._ops, "sum", comm._mpi.BAND)
    with pytest.raises(TypeError, match=r"^mpi: (MPICH|Open MPI) .* cannot reduce .* float64;"):
        call(comm, np.ones(comm.size))
