from pydtnn.tools.perfmodel.compute import Label
from pydtnn.tools.perfmodel.compute.segments import SegmentTimes
from pydtnn.utils.observer import Kind
from tests.each import each

FORWARD, CONV, RELU = (Kind.PHASE, "forward"), (Kind.FORWARD, "conv"), (Kind.FORWARD, "relu")
WAIT, KERNEL = (Kind.WAIT, "exchange"), (Kind.KERNEL, "conv.forward")


@each(
    ("activities", "times", "expected"),
    [
        (
            [FORWARD, CONV, None, RELU, None],
            (0, 10, 40, 100, 1000),
            {("phase", "forward", 0): 10, ("forward", "conv", 0): 30}
            | {("phase", "forward", 1): 60, ("forward", "relu", 0): 900},
        ),
        # calls of the communicator end a segment and belong to none
        (
            [CONV, WAIT, None, None],
            (0, 10, 400, 430),
            {("forward", "conv", 0): 10, ("forward", "conv", 1): 30},
        ),
        ([CONV, KERNEL, None, None], (0, 10), {("forward", "conv", 0): 10}),
        # executions in a step are averaged
        ([FORWARD, None, FORWARD, None], (0, 10, 20, 50), {("phase", "forward", 0): 20}),
    ],
)
def test_a_segment_belongs_to_the_innermost_activity_and_is_numbered_within_it(
    activities, times, expected
):
    # a notification reads the clock when it begins and when it ends
    clock = iter([time for time in times for _ in range(2)])
    own = SegmentTimes(lambda: next(clock))
    for activity in activities:
        own.end() if activity is None else own.begin(*activity)
    found = {label: round(1e9 * seconds) for label, seconds in own.take().items()}
    assert found == {Label(*label): nanoseconds for label, nanoseconds in expected.items()}
    assert own.take() == {}


def test_time_of_tests_of_requests_is_subtracted_from_the_segment_that_makes_them():
    clock = iter([0, 0, 100, 100])
    times = SegmentTimes(lambda: next(clock))
    times.begin(Kind.PHASE, "backward")
    times.traffic.seconds += 30e-9
    times.end()
    assert round(1e9 * times.take()[Label("phase", "backward", 0)]) == 70
