"""The communicator over MPI keeps the contract in worlds of 1 to 4 ranks."""

import pytest

from tests.comm.communicator_contract import CommunicatorContract


@pytest.mark.mpi
class TestMpi(CommunicatorContract):
    pass
