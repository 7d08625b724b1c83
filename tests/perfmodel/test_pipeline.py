import pytest

from pydtnn.parallel.pipeline.check import check, plan_of
from pydtnn.perfmodel.timing import StageTime, carry_out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
def test_equal_stages_take_as_long_as_in_the_check_of_schedules(schedule: str) -> None:
    ends = carry_out(plan_of(schedule, 3, 6), [StageTime(1.0, 2.0)] * 3)
    assert max(ends) == check(schedule, 3, 6).duration


def test_the_slowest_stage_determines_the_time() -> None:
    stages = [StageTime(1.0, 2.0), StageTime(2.0, 4.0)]
    assert max(carry_out(plan_of("1f1b", 2, 100), stages)) == pytest.approx(600, rel=0.02)


def test_messages_delay_the_stages_that_wait_for_them() -> None:
    fast, slow = (
        max(carry_out(plan_of("gpipe", 2, 1), [StageTime(1.0, 2.0, wire, wire)] * 2))
        for wire in (0.0, 0.5)
    )
    assert (fast, slow) == (6, 7)
