import numpy as np
import pytest

from pydtnn.comm import Serial, run_threads
from pydtnn.tools.perfmodel.compute.measured import Detachable


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
                for dtype in ("float64", "uint8"):
                    comm.send(np.array([3, 1], dtype), 1)  # numbers of rows
                    received = np.zeros(2, dtype)
                    comm.recv(received, 1)
                    assert received.tolist() == [3, 1]
                assert comm.gather_object("x") == ["x", "x"]
                comm.barrier()
        comm.barrier()
        total = np.ones(1)
        comm.allreduce(total)
        return total[0]

    assert run_threads(2, rank) == [2, 2]


def test_a_detached_rank_sleeps_where_it_waits_if_it_shares_its_core(monkeypatch):
    slept = []
    monkeypatch.setattr("pydtnn.tools.perfmodel.compute.measured.time.sleep", slept.append)
    comm = Detachable(Serial())
    with comm.detached(pause=0.02):
        for _ in range(3):
            comm.recv(np.zeros(4), 0)
        with pytest.raises(ValueError, match="groups cannot be created"):
            comm.split(0)
    assert slept == [0.02] * 3
