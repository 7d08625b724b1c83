"""All ranks agree on the last step, however far each of them is."""

from __future__ import annotations

from pydtnn.comm.monitor import supervision as of_rank
from pydtnn.comm.monitor.state import SETTLED_S, LastStepVote
from pydtnn.comm.monitor.supervision import Last


def test_the_last_step_is_the_furthest_that_a_rank_has_begun():
    told: list[tuple[object, ...]] = []
    agreement = LastStepVote(3, lambda *message: told.append(message))
    agreement.request(15, 2, 100.0)
    agreement.request(2, 0, 100.0)  # part of the same request
    assert told == [("freeze",)]
    for rank, begun in enumerate((7, 9, 8)):
        agreement.answer(rank, begun)
    assert told == [("freeze",), ("last", 9, 15, 2)]
    agreement.request(15, 1, 101.0)  # sent before rank 1 knew; another rank is at the last step
    assert told == [("freeze",), ("last", 9, 15, 2)]
    agreement.request(15, 1, 101.0 + SETTLED_S)  # another training
    assert told[2:] == [("freeze",)]


def test_the_run_ends_at_once_if_a_rank_is_not_in_training():
    told: list[tuple[object, ...]] = []
    agreement = LastStepVote(2, lambda *message: told.append(message))
    agreement.request(15, 1, 100.0)
    agreement.answer(0, 4)
    agreement.answer(1, -1)
    assert told[-1] == ("last", -1, 15, 1)


def test_without_other_ranks_the_step_in_progress_is_the_last():
    one = of_rank.LastStep()
    assert not one.request(15)  # outside of training
    one.start()
    assert one.passed() is None
    assert one.request(15)
    assert one.request(2)  # the same signal, from the launcher
    assert not one.overdue()
    assert one.passed() == Last(1, 15, 0)
    assert not one.request(15)


def test_a_signal_that_arrives_after_the_last_step_is_the_same_one():
    """It was sent to every rank, and another one was faster."""
    one = of_rank.LastStep(lambda signal: True)
    one.start()
    assert one.passed() is None
    assert one.hold() == 1
    one.decide(Last(1, 15, 2))
    assert one.passed() == Last(1, 15, 2)
    one.stop()
    assert one.request(15)
    assert not one.overdue()
    one.twice = -1.0
    assert not one.request(15)
    one.start()  # another training
    assert one.passed() is None
    none = of_rank.LastStep(lambda signal: True)
    none.start()
    none.decide(Last(0, 15, 2))  # before the first one
    none.stop()
    assert none.request(15)


def test_where_a_rank_has_failed_a_signal_ends_the_run_at_once():
    one = of_rank.LastStep(lambda signal: True)
    one.start()
    assert one.request(15)
    assert one.hold() == 0
    assert not one.overdue()
    one.abandon()
    assert one.overdue()
    assert one.passed() is None  # no rank waits for an agreement that does not come
    assert not one.request(15)


def test_a_second_signal_and_a_step_that_lasts_too_long_end_the_run_at_once():
    one = of_rank.LastStep()
    one.start()
    assert one.request(15)
    one.twice = one.grace = -1.0
    assert not one.request(15)
    assert one.overdue()
