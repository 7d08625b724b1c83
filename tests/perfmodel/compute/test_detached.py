import time

import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.perfmodel.compute.measured import Detachable


def test_a_detached_rank_completes_all_operations_alone():
    def rank(inner):
        comm = Detachable(inner)
        group = comm.split(0)
        if comm.rank == 0:
            with comm.detached():
                own = np.arange(4.0)
                group.allreduce(own)
                assert own.tolist() == [0, 1, 2, 3]
                part = np.empty(2)
                comm.reduce_scatter(own, [2, 2], part)
                assert part.tolist() == [0, 1]
                whole = np.empty(4)
                comm.allgather(part, [2, 2], whole)
                assert whole.tolist() == [0, 1, 0, 1]
                values = np.zeros(100, "float32")
                comm.recv(values, 1)
                assert 0 < np.abs(values).max() < 1
                comm.send(np.array([3.0, 1.0]), 1)  # numbers of rows
                received = np.zeros(2)
                comm.recv(received, 1)
                assert received.tolist() == [3, 1]
                assert comm.gather_object("x") == ["x", "x"]
                comm.barrier()
        comm.barrier()
        total = np.ones(1)
        comm.allreduce(total)
        return total[0]

    assert run_threads(2, rank) == [2, 2]


def test_a_detached_rank_receives_integers_that_it_has_sent():
    def rank(inner):
        comm = Detachable(inner)
        with comm.detached():
            comm.send(np.array([3, 1], "uint8"), 1 - comm.rank)
            received = np.zeros(2, "uint8")
            comm.recv(received, 1 - comm.rank)
        return received.tolist()

    assert run_threads(2, rank) == [[3, 1], [3, 1]]


def test_groups_cannot_be_created_by_a_detached_rank():
    def rank(inner):
        comm = Detachable(inner)
        with comm.detached(), pytest.raises(ValueError, match="groups cannot be created"):
            comm.split(0)

    run_threads(2, rank)


@pytest.mark.measure
def test_a_detached_rank_sleeps_where_it_waits_if_it_shares_its_core():
    def rank(inner):
        comm, array = Detachable(inner), np.zeros(4)
        other = 1 - comm.rank
        with comm.detached(pause=0.02):
            wall, used = time.perf_counter(), time.thread_time()
            for _ in range(3):
                comm.recv(array, other)
            return time.perf_counter() - wall, time.thread_time() - used

    for wall, used in run_threads(2, rank):
        assert wall >= 0.06
        assert used < 0.03
