"""Ranks agree to go on or to stop."""

from contextlib import nullcontext

import pytest

from pydtnn.comm import agree, require_equal
from pydtnn.utils.errors import AgreedError


@pytest.mark.threads(1, 3)
@pytest.mark.mpi(1, 2)
def test_the_same_error_of_all_ranks_is_told_without_a_rank(comm):
    agree(comm)
    mine = ValueError("Dropout: rate 2 must be below 1.")
    with pytest.raises(AgreedError, match=r"^Dropout: rate 2 must be below 1\.$") as caught:
        agree(comm, mine)
    assert caught.value.ranks == tuple(range(comm.size))
    assert caught.value.__cause__ is mine


@pytest.mark.threads(2, 3)
@pytest.mark.mpi(2)
def test_an_error_of_the_last_rank_is_raised_by_all_and_names_it(comm):
    last = comm.size - 1
    mine = FileNotFoundError("no such file") if comm.rank == last else None
    with pytest.raises(AgreedError, match=rf"^rank {last}: no such file$") as caught:
        agree(comm, mine)
    assert caught.value.ranks == (last,)


@pytest.mark.threads(4)
def test_different_errors_are_told_with_their_ranks(comm):
    mine = [ValueError("a"), None, ValueError("b"), ValueError("a")][comm.rank]
    with pytest.raises(AgreedError, match=r"^ranks 0, 3: a; rank 2: b$"):
        agree(comm, mine)


@pytest.mark.threads(1, 3)
def test_ranks_that_differ_in_a_fact_are_refused_with_both_values(comm):
    require_equal(comm, "train", {"model": "mlp", "shapes": [(3, 4)]}, "start again")
    facts = {"model": "mlp", "lr": 0.2 if comm.rank == 2 else 0.1}
    words = r"^train: all ranks .* same lr, got 0.1 on rank 0 and 0.2 on rank 2; start again$"
    with pytest.raises(AgreedError, match=words) if comm.size > 1 else nullcontext():
        require_equal(comm, "train", facts, "start again")
