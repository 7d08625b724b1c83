"""What every communicator promises: each of them runs this class, on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError
from tests.each import each

SIZES = (0, 1, 7, 1013, 140_009)
"""Elements: none, one, primes, and more than 1 MB in float64."""

REALS = ("float32", "float64")
TYPES = (*REALS, "float16", "int32", "int64", "uint8")


def whole(rank: int, size: int, dtype: str = "float64") -> np.ndarray:
    """Small whole numbers that differ from rank to rank: every sum is exact in every type."""
    return ((np.arange(size) + 3 * rank) % 7).astype(dtype)


def total(comm: Communicator, size: int, dtype: str = "float64") -> np.ndarray:
    return sum(whole(rank, size, dtype) for rank in range(comm.size)).astype(dtype)


def counts_for(comm: Communicator, size: int) -> list[int]:
    """Uneven parts, with none for rank 1."""
    weights = [0 if rank == 1 else rank + 1 for rank in range(comm.size)]
    ends = [size * sum(weights[: rank + 1]) // sum(weights) for rank in range(comm.size)]
    return np.diff([0, *ends]).tolist()


class CommunicatorContract:
    # -- the group --------------------------------------------------------------------------------

    def test_ranks_are_numbered_from_0(self, comm):
        assert comm.gather_object(comm.rank) == list(range(comm.size))

    def test_local_rank_counts_the_ranks_of_the_same_host(self, comm):
        assert len(comm.hosts) == comm.size
        here = [rank for rank in range(comm.size) if comm.hosts[rank] == comm.hosts[comm.rank]]
        assert comm.hosts[comm.rank] == here[0]
        assert comm.local_rank == here.index(comm.rank)
        assert comm.local_size == len(here)

    def test_gather_object_copies_every_value_to_every_rank(self, comm):
        mine = {"rank": comm.rank, "list": [comm.rank] * 3}
        everyone = comm.gather_object(mine)
        assert everyone == [{"rank": r, "list": [r] * 3} for r in range(comm.size)]
        assert everyone[comm.rank] is not mine

    def test_barrier_waits_for_every_rank(self, comm):
        for _ in range(3):
            comm.barrier()

    # -- freeing ----------------------------------------------------------------------------------

    def test_a_group_that_is_freed_refuses_every_call(self, comm):
        group = comm.split(0)
        group.allreduce(np.ones(3))
        assert not group.freed
        group.free()
        group.free()  # without effect
        assert group.freed
        for call in (group.barrier, lambda: group.allreduce(np.ones(3)), lambda: group.split(0)):
            with pytest.raises(ValueError, match="the communicator has been freed"):
                call()
        comm.barrier()

    def test_a_group_outlives_the_one_that_it_was_split_off_from(self, comm):
        first = comm.split(comm.rank % 2)
        second = first.split(0)
        first.free()
        x = np.ones(4)
        second.allreduce(x)
        assert (x == second.size).all()
        second.free()

    def test_a_with_block_frees_the_group(self, comm):
        with comm.split(0) as group:
            assert group.gather_object(1) == [1] * comm.size
        assert group.freed

    def test_an_error_of_one_rank_does_not_free_a_group_of_all(self, comm):
        """Freeing is collective, and the other ranks are not there."""
        group = comm.split(0)
        with pytest.raises(KeyError), group:
            raise KeyError
        assert not group.freed
        with pytest.raises(AgreedError), group:
            raise AgreedError("all ranks raise it")
        assert group.freed

    # -- collectives ------------------------------------------------------------------------------

    @each("dtype", TYPES)
    def test_allreduce_sums_in_place(self, comm, dtype):
        for size in SIZES:
            x = whole(comm.rank, size, dtype)
            comm.allreduce(x)
            assert x.dtype == dtype
            np.testing.assert_array_equal(x, total(comm, size, dtype))

    @each("dtype", TYPES)
    def test_allreduce_finds_the_largest_and_the_smallest(self, comm, dtype):
        everyone = [whole(rank, 1013, dtype) for rank in range(comm.size)]
        for op, reduction in (("max", np.max), ("min", np.min)):
            x = everyone[comm.rank].copy()
            comm.allreduce(x, op)
            np.testing.assert_array_equal(x, reduction(everyone, axis=0))

    @each("dtype", REALS)
    def test_allreduce_gives_every_rank_the_same_bytes_every_time(self, comm, dtype):
        mine = np.random.default_rng(comm.rank).standard_normal(140_009).astype(dtype)
        first = mine.copy()
        comm.allreduce(first)
        for _ in range(3):
            again = mine.copy()
            comm.allreduce(again)
            assert again.tobytes() == first.tobytes()
        assert len(set(comm.gather_object(first.tobytes()))) == 1

    def test_a_reduction_may_be_started_in_a_method_on_one_rank_and_before_it_on_others(self, comm):
        # Where the second message of a compressor starts depends on when the first is complete.
        before, x = comm.traffic.caller, np.ones(3)
        comm.iallreduce(np.ones(3)).wait()  # an algorithm may be chosen, with messages of its own
        comm.traffic.caller = before if comm.rank else "Trainer.evaluate"
        request = comm.iallreduce(x)
        comm.traffic.caller = before
        request.wait()
        assert x.tolist() == [comm.size] * 3

    def test_several_reductions_may_be_under_way_and_end_in_any_order(self, comm):
        sizes = (140_009, 1, 0, 1013, 65_536)
        arrays = [whole(comm.rank, size) for size in sizes]
        requests = [comm.iallreduce(x) for x in arrays]
        for request in reversed(requests):
            request.wait()
        for x, size in zip(arrays, sizes, strict=True):
            np.testing.assert_array_equal(x, total(comm, size))

    def test_a_reduction_completes_by_being_tested(self, comm):
        x = whole(comm.rank, 1013)
        request = comm.iallreduce(x)
        while not request.test():
            pass
        assert request.test()
        request.wait()
        np.testing.assert_array_equal(x, total(comm, 1013))

    def test_a_part_of_an_array_can_be_reduced_alone(self, comm):
        x = whole(comm.rank, 100)
        expected = x.copy()
        expected[10:20] = total(comm, 100)[10:20]
        comm.allreduce(x[10:20])
        np.testing.assert_array_equal(x, expected)

    @each("dtype", [*TYPES, "bool", "complex64", ">f4"])
    def test_broadcast_copies_the_array_of_any_root(self, comm, dtype):
        for size in SIZES:
            for root in {0, comm.size - 1}:
                x = whole(comm.rank, size, dtype)
                comm.broadcast(x, root)
                np.testing.assert_array_equal(x, whole(root, size, dtype))

    def test_the_root_may_write_its_array_after_a_broadcast(self, comm):
        x = np.full(1013, comm.rank)
        comm.broadcast(x, comm.size - 1)
        if comm.rank == comm.size - 1:
            x += 1
        comm.barrier()
        assert (x == comm.size - (comm.rank != comm.size - 1)).all()

    @each("dtype", REALS)
    def test_reduce_scatter_leaves_each_rank_its_uneven_part(self, comm, dtype):
        for size in SIZES:
            counts = counts_for(comm, size)
            x = whole(comm.rank, size, dtype)
            out = np.empty(counts[comm.rank], dtype)
            comm.reduce_scatter(x, counts, out)
            begin = sum(counts[: comm.rank])
            np.testing.assert_array_equal(out, total(comm, size, dtype)[begin : begin + out.size])
            np.testing.assert_array_equal(x, whole(comm.rank, size, dtype))

    @each("dtype", [*REALS, "bool"])
    def test_allgather_concatenates_uneven_parts(self, comm, dtype):
        for size in SIZES:
            counts = counts_for(comm, size)
            out = np.empty(size, dtype)
            comm.allgather(whole(comm.rank, counts[comm.rank], dtype), counts, out)
            parts = [whole(rank, count, dtype) for rank, count in enumerate(counts)]
            np.testing.assert_array_equal(out, np.concatenate(parts))

    def test_allgather_takes_a_part_that_is_in_its_place_already(self, comm):
        counts = counts_for(comm, 1013)
        begin = sum(counts[: comm.rank])
        out = np.zeros(1013)
        part = out[begin : begin + counts[comm.rank]]
        part[:] = whole(comm.rank, part.size)
        comm.allgather(part, counts, out)
        parts = [whole(rank, count) for rank, count in enumerate(counts)]
        np.testing.assert_array_equal(out, np.concatenate(parts))

    # -- messages ---------------------------------------------------------------------------------

    @each("dtype", [*TYPES, "bool"])
    def test_a_ring_passes_arrays_of_any_type_on(self, comm, dtype):
        for size in SIZES:
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            out = np.empty(size, dtype)
            requests = [comm.irecv(out, before), comm.isend(whole(comm.rank, size, dtype), after)]
            for request in requests:
                request.wait()
            np.testing.assert_array_equal(out, whole(before, size, dtype))

    def test_blocking_messages_go_there_and_back(self, comm):
        x = whole(comm.rank, 140_009)
        if comm.rank == 0:
            for other in range(1, comm.size):
                comm.send(x, other)
                back = np.empty_like(x)
                comm.recv(back, other)
                np.testing.assert_array_equal(back, x + other)
        else:
            comm.recv(x, 0)
            comm.send(x + comm.rank, 0)

    def test_messages_of_one_tag_arrive_in_the_order_in_which_they_were_sent(self, comm):
        last = comm.size - 1
        if comm.rank == 0:
            sends = [comm.isend(np.full(3, i), last) for i in range(5)]
        if comm.rank == last:
            received = [np.empty(3, int) for _ in range(5)]
            for request in [comm.irecv(x, 0) for x in received]:
                request.wait()
            assert [x[0] for x in received] == [0, 1, 2, 3, 4]
        if comm.rank == 0:
            for request in sends:
                request.wait()

    def test_a_receive_takes_the_message_with_its_tag(self, comm):
        last = comm.size - 1
        if comm.rank == 0:
            sends = [comm.isend(np.full(3, tag), last, tag) for tag in (5, 6, 7)]
        if comm.rank == last:
            for tag in (7, 5, 6):
                x = np.empty(3, int)
                comm.irecv(x, 0, tag).wait()
                assert (x == tag).all()
        if comm.rank == 0:
            for request in sends:
                request.wait()

    def test_every_pair_of_ranks_exchanges_at_once(self, comm):
        received = np.empty((comm.size, 1013))
        requests = [comm.irecv(received[peer], peer) for peer in range(comm.size)]
        requests += [
            comm.isend(np.full(1013, 10.0 * comm.rank + peer), peer) for peer in range(comm.size)
        ]
        while not all([request.test() for request in requests]):
            pass
        np.testing.assert_array_equal(received[:, 0], 10 * np.arange(comm.size) + comm.rank)

    def test_a_receive_from_any_rank_says_whose_message_it_has(self, comm):
        """Two messages of each rank to the last one, itself included, in the order of each."""
        last = comm.size - 1
        sends = [comm.isend(np.full(1013, 10.0 * comm.rank + i), last) for i in range(2)]
        if comm.rank == last:
            arrays = [np.empty(1013) for _ in range(2 * comm.size)]
            requests = [comm.irecv(array, None) for array in arrays]
            for request in reversed(requests):
                request.wait()
            sources = [request.source for request in requests]
            assert sorted(sources) == sorted([*range(comm.size)] * 2)
            for rank in range(comm.size):
                own = [a[0] for a, source in zip(arrays, sources, strict=True) if source == rank]
                assert own == [10 * rank, 10 * rank + 1]
        for request in sends:
            request.wait()

    def test_receives_from_any_rank_and_from_one_take_messages_in_their_order(self, comm):
        """They leave those of other tags, and each takes the first message that it may."""
        last = comm.size - 1
        if comm.rank == 0:
            sends = [comm.isend(np.full(3, i), last, tag) for i, tag in enumerate((7, 5, 5, 5))]
        if comm.rank == last:
            x = np.empty((4, 3), int)
            receives = [
                comm.irecv(x[i], source, 5) for i, source in enumerate((None, 0, None), start=1)
            ]
            for request in receives:
                while not request.test():
                    clock.current().pause()
            assert [request.source for request in receives] == [0, 0, 0]
            if comm.size > 1:
                assert comm.recv(x[0], None, 7) == 0
            else:
                comm.irecv(x[0], 0, 7).wait()
            assert x[:, 0].tolist() == [0, 1, 2, 3]
        if comm.rank == 0:
            for request in sends:
                request.wait()

    @each("source", [0, None])
    @each("length", [4, 6])
    def test_a_message_of_another_length_is_refused_by_its_receiver(self, comm, length, source):
        requests = []
        if comm.rank == 0:
            requests = [comm.isend(np.zeros(length), comm.size - 1)]
        if comm.rank == comm.size - 1:
            with pytest.raises(ValueError, match="recv: expected a message of 40 bytes"):
                comm.irecv(np.zeros(5), source).wait()
        for request in requests:
            request.wait()

    def test_a_round_of_messages_is_exchanged_by_all_at_once(self, comm):
        """Two rounds under way, of two messages each to every other rank; some are empty."""
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        rounds = []
        for number in range(2):
            lengths = [0, 1013 + number]
            sends = [(whole(comm.rank + n, n), rank) for rank in others for n in lengths]
            receives = [(np.empty(n), rank) for rank in others for n in lengths]
            rounds.append((receives, comm.exchange(sends, receives, tag=number)))
        for receives, request in reversed(rounds):
            request.wait()
            assert request.test()
            for array, rank in receives:
                np.testing.assert_array_equal(array, whole(rank + array.size, array.size))

    def test_ranks_may_have_nothing_to_say_in_a_round(self, comm):
        last = comm.size - 1
        x = whole(comm.rank, 7)
        sends = [(x, last)] if comm.rank == 0 < last else []
        receives = [(x, 0)] if comm.rank == last > 0 else []
        comm.exchange(sends, receives).wait()
        np.testing.assert_array_equal(x, whole(0 if comm.rank == last else comm.rank, 7))
        comm.barrier()  # a sender must not leave before its device has sent

    def test_exchanging_with_oneself_or_nobody_is_refused(self, comm):
        with pytest.raises(ValueError, match="expected another rank"):
            comm.exchange([(np.ones(1), comm.rank)], [])
        with pytest.raises(
            ValueError, match=f"rank must be from 0 to {comm.size - 1}, got {comm.size}"
        ):
            comm.exchange([], [(np.ones(1), comm.size)])

    # -- groups -----------------------------------------------------------------------------------

    def test_split_makes_a_group_of_each_color(self, comm):
        group = comm.split(comm.rank % 2)
        members = list(range(comm.rank % 2, comm.size, 2))
        assert group.gather_object(comm.rank) == members
        x = np.array([comm.rank])
        group.allreduce(x)
        assert x[0] == sum(members)

    def test_split_orders_the_ranks_by_key(self, comm):
        group = comm.split(0, key=-comm.rank)
        assert group.rank == comm.size - 1 - comm.rank
        assert group.gather_object(comm.rank) == list(range(comm.size))[::-1]

    def test_messages_of_different_groups_do_not_meet(self, comm):
        twin = comm.split(0)
        ours, theirs = np.empty(1), np.empty(1)
        receives = [twin.irecv(theirs, comm.rank), comm.irecv(ours, comm.rank)]
        sends = [comm.isend(np.ones(1), comm.rank), twin.isend(np.zeros(1), comm.rank)]
        for request in receives + sends:
            request.wait()
        assert (ours[0], theirs[0]) == (1, 0)

    def test_split_by_host_keeps_the_ranks_of_this_host(self, comm):
        local = comm.split_by_host()
        assert (local.rank, local.size) == (comm.local_rank, comm.local_size)
        assert local.hosts == (0,) * local.size

    # -- mistakes: refused by each rank before anything is sent -----------------------------------

    @each(
        ("error", "words", "mistake"),
        [
            (TypeError, "got list", lambda comm: comm.allreduce([1.0])),
            (ValueError, r"got shape \(2, 2\)", lambda comm: comm.allreduce(np.ones((2, 2)))),
            (ValueError, "contiguous", lambda comm: comm.iallreduce(np.ones(6)[::2])),
            (ValueError, "read-only", lambda comm: comm.broadcast(np.broadcast_to(1.0, 1))),
            (TypeError, "Python objects", lambda comm: comm.broadcast(np.array([None]))),
            (TypeError, "floats, got bool", lambda comm: comm.allreduce(np.ones(1, bool))),
            (TypeError, "floats, got >f4", lambda comm: comm.allreduce(np.ones(1, ">f4"))),
            (ValueError, "use one of sum", lambda comm: comm.allreduce(np.ones(1), "mean")),
            (ValueError, "rank must be", lambda comm: comm.broadcast(np.ones(1), comm.size)),
            (ValueError, "rank must be", lambda comm: comm.isend(np.ones(1), -1)),
            (ValueError, "tag must be", lambda comm: comm.irecv(np.ones(1), 0, tag=-1)),
            (ValueError, "rank must be", lambda comm: comm.irecv(np.ones(1), -1)),
            (ValueError, "color must be", lambda comm: comm.split(-1)),
            (
                ValueError,
                "counts, none below 0",
                lambda comm: comm.allgather(np.ones(1), [1] * (comm.size + 1), np.ones(9)),
            ),
            (
                ValueError,
                "expected counts with a sum",
                lambda comm: comm.allgather(np.ones(1), [1] * comm.size, np.ones(9)),
            ),
            (
                ValueError,
                "expected a part of 1 elements",
                lambda comm: comm.allgather(np.ones(2), [1] * comm.size, np.ones(comm.size)),
            ),
            (
                TypeError,
                "of the same type",
                lambda comm: comm.reduce_scatter(
                    np.ones(comm.size), [1] * comm.size, np.ones(1, "f4")
                ),
            ),
        ],
    )
    def test_a_mistake_is_told_in_one_sentence(self, comm, error, words, mistake):
        with pytest.raises(error, match=words) as caught:
            mistake(comm)
        assert "\n" not in str(caught.value)

    def test_reduce_scatter_refuses_an_output_inside_its_input(self, comm):
        x = np.ones(comm.size)
        with pytest.raises(ValueError, match="out must not overlap"):
            comm.reduce_scatter(x, [1] * comm.size, x[comm.rank : comm.rank + 1])


def contract(wrap: Callable[[Communicator], Communicator]) -> type:
    """Make the contract's tests for communicators that wrap another."""

    def wrapping(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(self: Any, comm: Communicator, **fixtures: Any) -> None:
            test(self, comm=wrap(comm), **fixtures)

        return run

    tests = {
        name: wrapping(test)
        for name, test in vars(CommunicatorContract).items()
        if name.startswith("test_")
    }
    return type("Contract", (), tests)
