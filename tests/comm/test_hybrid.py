"""Ranks that are threads of processes keep the contract, and sum in one order wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, hybrid, run_threads
from pydtnn.comm.hybrid import run_hybrid
from pydtnn.utils.errors import AgreedError, RankError
from tests.comm.communicator_contract import CommunicatorContract
from tests.each import each


def on_processes(processes: int, ranks: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """Run a function on ranks of processes, which are threads in these tests."""
    parts = run_threads(processes, lambda comm: run_hybrid(comm, ranks, function))
    return [result for part in parts for result in part]


@pytest.mark.long
@pytest.mark.threads(4, run=lambda ranks, rank: on_processes(3, ranks, rank))
class TestHybrid(CommunicatorContract):
    """Two ranks in the first process, and one in each of the others."""

    def test_a_receive_from_any_rank_says_whose_message_it_has(self, comm):
        with pytest.raises(ValueError, match="name a rank"):
            comm.irecv(np.zeros(1), None)

    test_receives_from_any_rank_and_from_one_take_messages_in_their_order = None
    test_a_message_of_another_length_is_refused_by_its_receiver = None  # of any rank, too


def sums(comm: Communicator) -> tuple[bytes, ...]:
    """Sum arrays whose sum depends on the order, of all ranks and of groups."""
    found = []
    halves = comm.split(comm.rank % 2), comm.split(comm.rank // 2)
    for group in (comm, *halves, halves[0].split(0)):
        for size in (1, 7, 6001):
            x = np.random.default_rng([comm.rank, size]).normal(size=size).astype("float32")
            parts = [size, *[0] * (group.size - 1)]
            part = np.empty(parts[group.rank], "float32")
            group.reduce_scatter(x, parts, part)
            arrays = [x, x[::-1].copy()]
            for request in [group.iallreduce(array) for array in arrays][::-1]:
                request.wait()
            found += [array.tobytes() for array in (part, *arrays)]
    return tuple(found)


@each("processes", [2, 3, 4, 6])
def test_sums_have_the_same_bytes_on_any_number_of_processes(processes):
    expected = on_processes(1, 6, sums)
    assert on_processes(processes, 6, sums) == expected
    assert len({*expected}) > 1


def test_a_group_has_one_name_on_all_of_its_ranks_and_no_other_has_it():
    def rank(comm: Communicator) -> list[tuple[str, tuple[int, ...]]]:
        groups = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        return [(group.name, tuple(group.members)) for group in groups]

    for processes in (2, 4):
        found = {group for groups in on_processes(processes, 4, rank) for group in groups}
        assert {members for _, members in found} == {(0, 1), (2, 3), (0, 2), (1, 3)}
        assert len({name for name, _ in found}) == len(found) == 4


def test_an_error_has_the_number_of_its_rank_among_all():
    def rank(comm: Communicator) -> None:
        if comm.rank == 3:
            raise KeyError("lost")
        comm.barrier()

    with pytest.raises(RankError, match="rank 3: "):
        on_processes(2, 4, rank)


@each(
    ("processes", "ranks", "problem"),
    [
        (3, 2, "2 ranks can be shared by at most 2 processes"),
        (2, 33, "several with at most 16 of them each"),
    ],
)
def test_too_many_processes_and_too_few_are_refused(processes, ranks, problem):
    with pytest.raises(AgreedError, match=problem):
        on_processes(processes, ranks, lambda comm: None)


def test_groups_have_numbers_of_their_own_until_they_are_freed(monkeypatch):
    monkeypatch.setattr(hybrid, "CODES", 16)  # 4 groups of up to 2 ranks of a process

    def split(comm: Communicator) -> None:
        for _ in range(9):
            with comm.split(0) as all_of, comm.split(comm.rank % 2) as half:
                assert {all_of._number, half._number} == {1, 2}
        groups = [comm.split(0) for _ in range(3)]
        with pytest.raises(AgreedError, match="at most 4 groups at a time with up to 2 ranks"):
            groups[0].split(0)

    on_processes(2, 4, split)
