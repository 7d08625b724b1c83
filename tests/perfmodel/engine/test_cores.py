from math import inf

import numpy as np
import pytest

from pydtnn.perfmodel.engine.cores import Cores
from pydtnn.perfmodel.virtual import SharedCores, run_virtual
from pydtnn.utils import clock
from tests.perfmodel.virtual.costs import UniformCosts, cluster


def ends(number: int, starts: list[tuple[float, int, float]]) -> dict[int, float]:
    """When each rank ends that starts at a time and computes so many seconds."""
    cores, found, waiting = Cores(SharedCores(number, (0,) * 9)), {}, sorted(starts)
    while waiting or cores.next_end() < inf:
        if waiting and waiting[0][0] <= cores.next_end():
            now, rank, seconds = waiting.pop(0)
            cores.start(now, rank, seconds)
        else:
            now = cores.next_end()
            found |= {rank: now for rank, _ in cores.end(now)}
    return found


def test_ranks_with_a_core_each_do_not_delay_each_other():
    assert ends(2, [(0.0, 0, 1.0), (0.5, 1, 1.0)]) == pytest.approx({0: 1.0, 1: 1.5})


def test_ranks_that_compute_share_the_cores_equally():
    assert ends(2, [(0.0, rank, 1.0) for rank in range(4)]) == pytest.approx(
        dict.fromkeys(range(4), 2.0)
    )


def test_all_ranks_have_the_part_of_those_on_the_core_with_most_ranks():
    assert ends(2, [(0.0, rank, 1.0) for rank in range(3)]) == pytest.approx(
        dict.fromkeys(range(3), 2.0)
    )
    assert SharedCores(2, (0,) * 3).slowdown == 2.0


def test_a_rank_is_faster_once_others_have_ended():
    # together until each has computed 1 s, at 2 s; then the second is alone
    assert ends(1, [(0.0, 0, 1.0), (0.0, 1, 3.0)]) == pytest.approx({0: 2.0, 1: 4.0})


def test_groups_have_cores_of_their_own():
    cores = Cores(SharedCores(1, ("a", "b")))
    cores.start(0.0, 0, 1.0)
    cores.start(0.0, 1, 1.0)
    assert cores.next_end() == pytest.approx(1.0)
    assert cores.end(1.0) == [(0, 0), (1, 0)]


def test_the_jobs_of_a_rank_share_its_cores():
    cores = Cores(SharedCores(1, ("a",)))
    cores.start(0.0, 0, 1.0)
    cores.start(0.0, 0, 0.5, job=7)
    assert cores.next_end() == pytest.approx(1.0)
    assert cores.end(1.0) == [(0, 7)]
    assert cores.next_end() == pytest.approx(1.5)


def test_a_rank_that_waits_for_a_message_leaves_its_core_to_others():
    """Rank 0 computes 2 s before it sends; rank 1 waits, then computes 1 s beside rank 2's 3 s."""

    def rank(comm):
        own, word = clock.current(), np.zeros(1)
        if comm.rank == 0:
            own.spend(2.0)
            comm.send(word, 1)
        elif comm.rank == 1:
            comm.recv(word, 0)
            own.spend(1.0)
        else:
            own.spend(3.0)

    network, costs = cluster("aaa"), UniformCosts()
    run = run_virtual(rank, network=network, costs=costs, cores=SharedCores(1, (0, 0, 0)))
    # 0 and 2 share until 4 s; then 1 and 2, which both have 1 s left, until 6 s
    assert run.seconds == pytest.approx([4.0, 6.0, 6.0], abs=1e-3)


def test_there_is_at_least_one_core():
    with pytest.raises(ValueError, match="SharedCores: number must be at least 1"):
        SharedCores(0, (0,))
