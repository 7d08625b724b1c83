from math import inf

import numpy as np
import pytest

from pydtnn.tools.perfmodel.engine.cores import REBALANCE_S, SECOND
from pydtnn.tools.perfmodel.engine.flows import Flows
from pydtnn.tools.perfmodel.virtual import SharedCores, run_virtual
from pydtnn.utils import clock
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


def ends(number: int, starts: list[tuple[float, int, float]]) -> dict[int, float]:
    """When each rank ends that starts at a time and computes so many seconds."""
    cores, found, waiting = Flows(SharedCores(number, (0,) * 9).network), {}, sorted(starts)
    while waiting or cores.next_end() < inf:
        if waiting and waiting[0][0] <= cores.next_end():
            now, rank, seconds = waiting.pop(0)
            cores.start(now, (0, 0), SECOND * seconds, rank)
        else:
            now = cores.next_end()
            found |= dict.fromkeys(cores.end(now), now)
    return found


@each(
    ("number", "starts", "expected"),
    [
        (2, [(0.0, 0, 1.0), (0.5, 1, 1.0)], [1.0, 1.5]),
        (2, [(0.0, rank, 1.0) for rank in range(4)], [2.0] * 4),
        (2, [(0.0, rank, 1.0) for rank in range(3)], [1.5] * 3),
        # together until each has computed 1 s, at 2 s; then the second is alone
        (1, [(0.0, 0, 1.0), (0.0, 1, 3.0)], [2.0, 4.0]),
    ],
)
def test_ranks_that_sleep_while_they_wait_have_equal_parts_of_all_cores(number, starts, expected):
    assert ends(number, starts) == pytest.approx(dict(enumerate(expected)))
    with pytest.raises(ValueError, match="number must be at least 1"):
        SharedCores(0, (0,))


def test_ranks_that_poll_have_the_part_of_those_on_their_core():
    cores = SharedCores(2, (0,) * 3, kept=True)
    assert [cores.end(rank, 0.0, 0.02) for rank in range(3)] == pytest.approx([0.04, 0.04, 0.02])
    even = SharedCores(2, (0,) * 8, kept=True)
    assert {even.end(rank, 0.3, 1.0) for rank in range(8)} == {4.3}


def test_ranks_that_poll_change_places_if_a_core_has_more_of_them():
    cores = SharedCores(2, (0,) * 3, kept=True)
    # 1/2, 1/2 and 1 of a core for a turn, then the place of another rank
    assert cores.end(2, 0.0, 0.12) == pytest.approx(REBALANCE_S + 2 * (0.12 - REBALANCE_S))
    assert cores.end(1, REBALANCE_S / 2, 0.12) == pytest.approx(
        REBALANCE_S + 0.12 - REBALANCE_S / 4
    )
    long = [cores.end(rank, 0.0, 10.0) for rank in range(3)]
    assert long == pytest.approx([15.0] * 3, rel=0.01)


def test_a_rank_that_polls_does_not_leave_its_core_to_others():
    def rank(comm):
        own, word = clock.current(), np.zeros(1)
        if comm.rank == 0:
            own.spend(2.0)
            comm.send(word, 1)
        elif comm.rank == 1:
            comm.recv(word, 0)
        return own.now()

    network, cores = cluster("aa"), SharedCores(1, (0, 0), kept=True)
    run = run_virtual(rank, network=network, costs=UniformCosts(), cores=cores)
    assert run.results == pytest.approx([4.0, 4.0], rel=1e-3)


def test_the_jobs_of_a_rank_share_its_cores():
    cores = Flows(SharedCores(1, ("a", "b")).network)  # rank 1 has a core of its own
    for name, group, seconds in (("first", "a", 1.0), ("other", "b", 1.0), ("second", "a", 0.5)):
        cores.start(0.0, (group, group), SECOND * seconds, name)
    assert cores.next_end() == pytest.approx(1.0)
    assert sorted(cores.end(1.0)) == ["other", "second"]
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
