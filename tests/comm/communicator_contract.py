"""What every communicator promises: each of them runs this class, on any number of ranks."""

from __future__ import annotations

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

    def test_local_rank_counts_the_ranks_of_the_same_host(self, comm):
        assert comm.gather_object(comm.rank) == list(range(comm.size))
        assert len(comm.hosts) == comm.size
        here = [rank for rank in range(comm.size) if comm.hosts[rank] == comm.hosts[comm.rank]]
        assert comm.hosts[comm.rank] == here[0]
        assert comm.local_rank == here.index(comm.rank)
        assert comm.local_size == len(here)
        local = comm.split_by_host()
        assert (local.rank, local.size) == (comm.local_rank, comm.local_size)
        assert local.hosts == (0,) * local.size

    def test_gather_object_copies_every_value_to_every_rank(self, comm):
        mine = {"rank": comm.rank, "list": [comm.rank] * 3}
        everyone = comm.gather_object(mine)
        assert everyone == [{"rank": r, "list": [r] * 3} for r in range(comm.size)]
        assert everyone[comm.rank] is not mine

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

    def test_an_error_of_one_rank_does_not_free_a_group_of_all(self, comm):
        """Freeing is collective, and the other ranks are not there."""
        with comm.split(0) as group:
            assert group.gather_object(1) == [1] * comm.size
        assert group.freed
        group = comm.split(0)
        with pytest.raises(KeyError), group:
            raise KeyError
        assert not group.freed
        with pytest.raises(AgreedError), group:
            raise AgreedError("all ranks raise it")
        assert group.freed

    # -- collectives ------------------------------------------------------------------------------

    @each("dtype", TYPES)
    @each(("op", "reduction"), [("sum", np.sum), ("max", np.max), ("min", np.min)])
    def test_allreduce_works_in_place_on_a_part_of_an_array_too(self, comm, op, reduction, dtype):
        for size in SIZES if op == "sum" else SIZES[:-1]:
            everyone = [whole(rank, size + 2, dtype) for rank in range(comm.size)]
            x = everyone[comm.rank].copy()
            expected = x.copy()
            expected[1:-1] = reduction(everyone, axis=0)[1:-1]
            comm.allreduce(x[1:-1], op)
            assert x.dtype == dtype
            np.testing.assert_array_equal(x, expected)

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
        requests = [comm.iallreduce(x) for x in arrays][:: 1 if comm.rank else -1]
        for request in requests[1:]:
            while not request.test():
                pass
        requests[0].wait()
        assert requests[0].test()
        for x, size in zip(arrays, sizes, strict=True):
            np.testing.assert_array_equal(x, total(comm, size))

    @each("dtype", [*TYPES, "bool", "complex64", ">f4"])
    def test_broadcast_copies_the_array_of_any_root(self, comm, dtype):
        for size in SIZES:
            for root in {0, comm.size - 1}:
                x = whole(comm.rank, size, dtype)
                comm.broadcast(x, root)
                received = x.copy()
                x[:] = comm.rank == root  # the root may write while others still read
                np.testing.assert_array_equal(received, whole(root, size, dtype))

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

    @each("in_place", [False, True])
    @each("dtype", [*REALS, "bool"])
    def test_allgather_concatenates_uneven_parts(self, comm, dtype, in_place):
        for size in SIZES:
            counts = counts_for(comm, size)
            out, begin = np.empty(size, dtype), sum(counts[: comm.rank])
            part = whole(comm.rank, counts[comm.rank], dtype)
            if in_place:
                out[begin : begin + part.size] = part
                part = out[begin : begin + part.size]
            comm.allgather(part, counts, out)
            parts = [whole(rank, count, dtype) for rank, count in enumerate(counts)]
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

    # -- groups -----------------------------------------------------------------------------------

    def test_split_makes_a_group_of_each_color_in_the_order_of_keys(self, comm):
        group = comm.split(comm.rank % 2, key=-comm.rank)
        members = list(range(comm.rank % 2, comm.size, 2))[::-1]
        assert group.rank == members.index(comm.rank)
        assert group.gather_object(comm.rank) == members
        x = np.array([comm.rank])
        group.allreduce(x)
        assert x[0] == sum(members)

    def test_messages_of_different_groups_do_not_meet(self, comm):
        twin = comm.split(0)
        ours, theirs = np.empty(1), np.empty(1)
        receives = [twin.irecv(theirs, comm.rank), comm.irecv(ours, comm.rank)]
        sends = [comm.isend(np.ones(1), comm.rank), twin.isend(np.zeros(1), comm.rank)]
        for request in receives + sends:
            request.wait()
        assert (ours[0], theirs[0]) == (1, 0)

    @each(
        "call",
        [
            lambda comm, x: comm.barrier(),
            lambda comm, x: comm.broadcast(x, comm.size - 1),
            lambda comm, x: comm.allreduce(x),
            lambda comm, x: comm.allreduce(x, "max"),
            lambda comm, x: comm.allgather(x, [3] * comm.size, np.empty(3 * comm.size)),
            lambda comm, x: comm.reduce_scatter(np.ones(3 * comm.size), [3] * comm.size, x),
            lambda comm, x: comm.gather_object(3),
            lambda comm, x: comm.exchange(
                [(np.ones(3), rank) for rank in range(comm.size) if rank != comm.rank],
                [(np.empty(3), rank) for rank in range(comm.size) if rank != comm.rank],
            ).wait(),
            lambda comm, x: comm.split(0),
            lambda comm, x: comm.free(),
        ],
    )
    def test_every_call_on_a_group_drives_the_reductions_of_other_groups(self, comm, call):
        one, other, third = comm.split(0), comm.split(0), comm.split(0)
        for summing, calling in ((comm, one), (other, third)):
            x = whole(comm.rank, 1013)
            request = summing.iallreduce(x)
            if comm.rank == 0:
                call(calling, np.ones(3))
                request.wait()
            else:
                request.wait()
                call(calling, np.ones(3))
            np.testing.assert_array_equal(x, total(comm, 1013))

    # -- mistakes: refused by each rank before anything is sent -----------------------------------

    @each(
        ("error", "words", "mistake"),
        [
            (TypeError, "got list", lambda comm, x: comm.allreduce([1.0])),
            (ValueError, r"got shape \(2, 2\)", lambda comm, x: comm.allreduce(np.ones((2, 2)))),
            (ValueError, "contiguous", lambda comm, x: comm.iallreduce(np.ones(6)[::2])),
            (ValueError, "read-only", lambda comm, x: comm.broadcast(np.broadcast_to(1.0, 1))),
            (TypeError, "Python objects", lambda comm, x: comm.broadcast(np.array([None]))),
            (TypeError, "floats, got bool", lambda comm, x: comm.allreduce(np.ones(1, bool))),
            (TypeError, "floats, got >f4", lambda comm, x: comm.allreduce(np.ones(1, ">f4"))),
            (ValueError, "use one of sum", lambda comm, x: comm.allreduce(x, "mean")),
            (ValueError, "rank must be", lambda comm, x: comm.broadcast(x, comm.size)),
            (ValueError, "rank must be", lambda comm, x: comm.isend(x, -1)),
            (ValueError, "rank must be", lambda comm, x: comm.irecv(x, -1)),
            (ValueError, "rank must be", lambda comm, x: comm.exchange([], [(x, comm.size)])),
            (ValueError, "another rank", lambda comm, x: comm.exchange([(x, comm.rank)], [])),
            (ValueError, "tag must be", lambda comm, x: comm.irecv(x, 0, tag=-1)),
            (ValueError, "color must be", lambda comm, x: comm.split(-1)),
            (ValueError, "none below 0", lambda comm, x: comm.allgather(x, [1, -1], x)),
            (ValueError, "with a sum", lambda comm, x: comm.allgather(x, [1] * comm.size, x[:0])),
            (ValueError, "a part of 1", lambda comm, x: comm.allgather(x[:0], [1] * comm.size, x)),
            (TypeError, "type", lambda comm, x: comm.allgather(x[:1], [1] * comm.size, x > 0)),
            (ValueError, "overlap", lambda comm, x: comm.reduce_scatter(x, [1] * comm.size, x[:1])),
        ],
    )
    def test_a_mistake_is_told_in_one_sentence(self, comm, error, words, mistake):
        with pytest.raises(error, match=words) as caught:
            mistake(comm, np.ones(comm.size))
        assert "\n" not in str(caught.value)
