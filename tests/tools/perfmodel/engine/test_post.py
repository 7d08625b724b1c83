"""Messages between hosts occupy processors, and long ones proceed in calls only."""

import numpy as np
import pytest

from pydtnn.comm.waiting import MAX_SLEEP_S
from pydtnn.tools.perfmodel.engine.post import WAITING
from pydtnn.tools.perfmodel.virtual import Processor, SharedCores, run_virtual
from pydtnn.tools.perfmodel.virtual.communicator import PIECE
from pydtnn.utils import clock
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster

LENGTH = 1_250_000
"""Bytes that take 10 ms at the rate of `cluster`, and as much latency as makes no difference."""

COMPUTE = 0.1


def seconds(hosts, program, processor, cores=None):
    found = run_virtual(
        program, network=cluster(hosts), costs=UniformCosts(), processor=processor, cores=cores
    )
    return found.seconds


def pass_on(tests=0, nbytes=LENGTH):
    """A program: rank 0 sends, both compute with tests in between, then wait."""

    def program(comm):
        array, own = np.zeros(nbytes, "uint8"), clock.current()
        if comm.rank < 2:
            request = comm.irecv(array, 0) if comm.rank else comm.isend(array, 1)
        for _ in range(tests + 1):
            own.spend(COMPUTE / (tests + 1))
            if comm.rank < 2 and tests:
                request.test()
        if comm.rank < 2:
            request.wait()

    return program


@each(
    ("hosts", "tests", "options", "expected"),
    [
        ("ab", 0, {}, COMPUTE),  # beside the computation
        ("ab", 0, {"eager": 65536}, COMPUTE + 0.01),  # after it
        ("ab", 99, {"eager": 65536}, COMPUTE),  # within its tests
        ("aa", 0, {"eager": 65536}, COMPUTE),  # not between hosts
        ("ab", 0, {"eager": LENGTH}, COMPUTE),  # just short enough
        ("ab", 0, {"copy": 1e-8}, COMPUTE + LENGTH * 1e-8),
        ("aa", 0, {"copy": 1e-8}, COMPUTE),
    ],
)
def test_a_long_message_proceeds_in_calls_of_its_ranks_which_copy_it(
    hosts, tests, options, expected
):
    found = seconds(hosts, pass_on(tests), Processor(**options))
    assert found == pytest.approx([expected] * 2, rel=0.01)
    if "copy" not in options:
        shared = seconds(hosts, pass_on(tests), Processor(**options), SharedCores(2, (0, 0)))
        assert shared == pytest.approx([expected] * 2, rel=0.01)


def test_ranks_that_sleep_notice_the_start_of_a_long_message_late():
    """The receiver waits from the beginning on; each side notices half a pause and a wake late."""

    def program(comm):
        array = np.zeros(LENGTH, "uint8")
        if comm.rank:
            comm.recv(array, 0)
        else:
            clock.current().spend(COMPUTE)
            comm.send(array, 1)

    wake = 3e-3
    announced, eager = (
        seconds("ab", program, Processor(eager=nbytes, wake=wake)) for nbytes in (65536, np.inf)
    )
    later = np.subtract(announced, eager)  # with two latencies of 0.1 ms
    assert later == pytest.approx([2 * (wake + MAX_SLEEP_S / 2) + 2e-4] * 2, abs=2e-5)


def test_the_tests_of_ranks_that_sleep_are_work_on_shared_cores():
    """Rank 0 waits for 0.1 s, a fifth of which is work beside the second part of rank 1."""

    def program(comm):
        array = np.zeros(8, "uint8")
        if comm.rank == 0:
            comm.recv(array, 1)
        elif comm.rank == 1:
            clock.current().spend(COMPUTE)
            comm.send(array, 0)
            clock.current().spend(COMPUTE)

    test = MAX_SLEEP_S / 4
    found = seconds("aa", program, Processor(wake=0.0, test=test), SharedCores(1, (0, 0)))
    assert found[1] == pytest.approx(2 * COMPUTE + COMPUTE / 5, rel=0.02)


def test_a_rank_that_waits_copies_meanwhile_except_for_the_last_piece():
    def program(comm):
        array = np.zeros(LENGTH, "uint8")
        if comm.rank:
            comm.recv(array, 0)
        else:
            comm.send(array, 1)

    found = seconds("ab", program, Processor(copy=5e-9))
    assert found == pytest.approx([0.0101 + PIECE * 5e-9] * 2, rel=0.01)


def test_copies_are_work_beside_the_computation_of_ranks_that_share_cores():
    """Two ranks copy 12.5 ms each while three compute 100 ms, all on one core."""
    cores = SharedCores(1, (0, 0, 0))
    found = seconds("abc", pass_on(), Processor(copy=1e-8), cores)
    assert max(found) == pytest.approx(3 * COMPUTE + 2 * 0.0125, rel=0.01)


def test_a_rank_that_waits_copies_faster_than_one_that_computes():
    """Rank 2 computes on the core on which the others copy while they wait."""

    def program(comm):
        array = np.zeros(LENGTH, "uint8")
        if comm.rank == 0:
            comm.send(array, 1)
        elif comm.rank == 1:
            comm.recv(array, 0)
        else:
            clock.current().spend(COMPUTE)
        return clock.current().now()

    found = seconds("abc", program, Processor(copy=1e-8), SharedCores(1, (0, 0, 0)))
    assert found[2] == pytest.approx(COMPUTE + 2 * WAITING * LENGTH * 1e-8, rel=0.01)
