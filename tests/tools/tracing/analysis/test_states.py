"""States of the main threads of a small run, whose times are known."""

import numpy as np
import pytest

from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis import find_states, usage
from pydtnn.tools.tracing.analysis.states import State, count_open
from tests.each import each
from tests.tools.tracing.synthetic import LAYERS, MS, write_run

BESIDE_SUMS = LAYERS["conv2"][1] + LAYERS["conv1"][1] + MS // 2
"""What a rank computes from the start of the first sum to the end of the last wait, in ns."""


@each("messages", [True, False])
def test_computation_while_a_sum_is_in_flight_is_overlapped(tmp_path, messages):
    write_run(tmp_path, steps=3, messages=messages)
    for one in usage(load_timeline(tmp_path)):
        assert one.overlapped == pytest.approx(3e-9 * BESIDE_SUMS, abs=1e-6)
        assert one.overlapped < one.compute


def test_states_cover_the_steps_without_gaps(tmp_path):
    write_run(tmp_path, steps=4, noise=0.3)
    timeline = load_timeline(tmp_path)
    for rank, states in enumerate(find_states(timeline)):
        assert (np.diff(states.times) > 0).all()
        inside = timeline.steps.place(rank, states.times[:-1]) >= 0
        np.testing.assert_array_equal(states.state != State.OUTSIDE, inside)
        steps = timeline.steps.stop[:, rank] - timeline.steps.start[:, rank]
        assert states.seconds[1:].sum() == pytest.approx(steps.sum() / 1e9, abs=1e-9)


def test_a_rank_alone_neither_waits_nor_communicates_beyond_its_calls(tmp_path):
    write_run(tmp_path, ranks=1, steps=2)
    (one,) = usage(load_timeline(tmp_path))
    assert one.waiting == 0
    assert one.communication == pytest.approx(2 * 2 * 10e-6, abs=1e-9)  # two calls per step


def test_open_intervals_are_counted():
    times, start, stop = np.arange(6), np.array([0, 1, 1, 5]), np.array([5, 4, 2, 5])
    np.testing.assert_array_equal(count_open(times, start, stop), [1, 3, 2, 2, 1])
