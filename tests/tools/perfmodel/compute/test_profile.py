import pytest

from pydtnn.tools.perfmodel.compute import Label
from pydtnn.tools.perfmodel.compute.profile import MeasuredCosts, Profile, RankProfile

CONV, LOSS = Label("forward", "conv", 0), Label("phase", "loss", 0)
STEPS = ({CONV: 1.0, LOSS: 0.25}, {CONV: 3.0, LOSS: 0.5}, {CONV: 2.0})


RANK = RankProfile(STEPS, 4)


def test_costs_are_medians_over_the_steps_of_layers_in_proportion_to_samples():
    costs = MeasuredCosts(RANK)
    assert [costs.seconds(CONV, None, n) for n in (4, 2)] == [2.0, 1.0]
    assert [costs.seconds(LOSS, None, n) for n in (4, 2)] == [0.375] * 2


def test_a_layer_that_was_not_measured_is_an_error_and_a_phase_is_free():
    costs = MeasuredCosts(RANK)
    assert costs.seconds(Label("phase", "checkpoint"), None, 4) == 0.0
    assert costs.seconds(Label("forward", "conv", 1), None, 4) == 0.0
    with pytest.raises(ValueError, match="expected a layer of the measured network, got relu"):
        costs.seconds(Label("forward", "relu"), None, 4)


def test_the_spread_is_that_of_whole_steps():
    assert RankProfile(({CONV: 1.0},) * 5, 4).spread == 0.0
    assert RANK.spread > 0.1


def test_typical_steps_are_those_of_the_middle_on_the_slowest_rank():
    def rank(*seconds):
        return RankProfile(tuple({CONV: time} for time in seconds), 4)

    both = Profile((rank(9.0, 1.0, 2.0, 1.0, 1.0, 7.0), rank(1.0, 3.0, 1.0, 5.0, 8.0, 6.0)))
    found = both.typical(3)  # the slowest take 9, 3, 2, 5, 8 and 7 s
    assert [step[CONV] for step in found.ranks[0].steps] == [1.0, 1.0, 7.0]
    assert [step[CONV] for step in found.ranks[1].steps] == [3.0, 5.0, 6.0]
    assert both.typical(6) == both.typical(9) == both
    assert both.deciles() == pytest.approx((2.5 / 6, 8.5 / 6))


def test_varying_costs_are_those_of_the_measured_steps_in_turns():
    costs = MeasuredCosts(RANK, varying=True)
    assert [costs.seconds(CONV, None, 4) for _ in range(4)] == [1.0, 3.0, 2.0, 1.0]
    assert [costs.seconds(LOSS, None, 4) for _ in range(3)] == [0.25, 0.5, 0.25]
