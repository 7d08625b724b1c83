"""Schedules at their boundary steps, warm-up, names, bad input."""

from fractions import Fraction

import pytest

from pydtnn.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    CosineRestarts,
    OneCycle,
    Polynomial,
    StableDecay,
    Step,
    Triangular,
    WarmUp,
    get_schedule,
)
from tests.each import each


def test_steps_apply_gamma_from_each_boundary_on_or_every_n_steps():
    assert [Constant(Fraction(1, 2))(t) for t in (0, 1, 10**9)] == [0.5] * 3
    schedule = Step(1.0, (10, 20), gamma=0.5)
    assert [schedule(t) for t in (0, 9, 10, 19, 20, 1000)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    schedule = Step(1.0, 10, gamma=0.5)
    assert [schedule(t) for t in (0, 9, 10, 19, 20, 35)] == [1, 1, 0.5, 0.5, 0.25, 0.125]


def test_a_cosine_falls_from_its_beginning_to_its_end():
    schedule = Cosine(1.0, steps=110, final=0.2, begin=10)
    assert [schedule(t) for t in (0, 10)] == [1, 1]
    assert schedule(35) == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2, rel=1e-12)
    assert schedule(60) == pytest.approx(0.6, rel=1e-12)
    assert [schedule(t) for t in (110, 111)] == pytest.approx([0.2, 0.2], rel=1e-12)


@each("factor", [1, 2, 3])
def test_restarts_are_cosines_one_after_the_other(factor):
    schedule, begin = CosineRestarts(1.0, 5, factor, final=0.1, begin=3), 3
    assert [schedule(t) for t in range(4)] == [1] * 4
    for length in (5 * factor**i for i in range(4)):
        one = Cosine(1.0, begin + length, 0.1, begin)
        given = [schedule(t) for t in range(begin, begin + length)]
        assert given == pytest.approx([one(t) for t in range(begin, begin + length)], rel=1e-12)
        begin += length
        assert schedule(begin) == 1
    assert 0.1 < schedule(10**12) <= 1  # without a loop over all periods


@each(("power", "middle"), [(1, 0.5), (2, 0.25)])
def test_a_polynomial_falls_along_its_power(power, middle):
    schedule = Polynomial(1.0, steps=20, power=power, begin=10)
    assert [schedule(t) for t in (0, 10, 15, 20, 21)] == [1, 1, middle, 0, 0]
    assert Polynomial(1.0, steps=10, final=0.5)(5) == 0.75


@each(("shape", "formula"), [("sqrt", lambda p: 1 - p**0.5), ("linear", lambda p: 1 - p)])
def test_a_stable_rate_decays_by_its_authors_formula_in_the_last_part(shape, formula):
    """Equation 1 of Hägele et al. 2024: N steps of which N_decay are the last."""
    eta, warm, total, last = 0.3, 10, 200, 40
    schedule = get_schedule("wsd", eta, total, 50, warmup_steps=warm, decay=0.2, shape=shape)
    for n in range(total + 1):
        stable = eta if n < total - last else eta * formula((n - (total - last)) / last)
        assert schedule(n) == pytest.approx(min(stable, eta * (n + 1) / (warm + 1)), abs=1e-15)
    exponential = StableDecay(1.0, 100, 0.5, "exponential", final=0.1)
    assert [exponential(t) for t in (50, 100)] == [1, 0.1]


def test_a_triangle_rises_over_a_fifth_and_falls_to_zero():
    schedule = Triangular(0.4, steps=100)
    assert schedule(0) == pytest.approx(0.4 / 21)
    assert schedule(20) == 0.4 == max(map(schedule, range(100)))
    rises = [schedule(t + 1) - schedule(t) for t in range(20)]
    falls = [schedule(t) - schedule(t + 1) for t in range(20, 99)]
    assert rises == pytest.approx([0.4 / 21] * 20, rel=1e-9)
    assert falls == pytest.approx([0.4 / 80] * 79, rel=1e-9)
    assert schedule(99) == pytest.approx(0.4 / 80)
    assert schedule(100) == schedule(1000) == 0
    assert Triangular(1.0, 1)(0) == Triangular(1.0, 1, 0.9)(0) == 1  # one step has the peak


def test_one_cycle_rises_and_falls_along_half_cosines():
    schedule = OneCycle(1.0, steps=102, rise=31 / 102, start=25, end=1000)
    assert schedule(0) == pytest.approx(1 / 25)
    assert schedule(15) == pytest.approx((1 + 1 / 25) / 2)
    assert schedule(30) == pytest.approx(1)
    assert (schedule(65) + schedule(66)) / 2 == pytest.approx((1 + 1 / 1000) / 2)
    assert schedule(101) == schedule(200) == pytest.approx(1 / 1000)


@each("steps", [1, 2, 10, 11, 1000])
@each("rise", [0.0, 0.3, 0.9])
def test_the_last_step_of_one_cycle_has_its_final_rate(steps, rise):
    schedule = OneCycle(0.1, steps, rise)
    assert schedule(steps - 1) == pytest.approx(0.1 / 250_000, rel=1e-9)


def test_names_give_schedules_for_a_length_of_training():
    def by_name(name, **options):
        return get_schedule(name, 0.4, 1000, 100, **options)

    assert by_name("constant") == Constant(0.4)
    assert by_name("warmup") == WarmUp(Constant(0.4), 100)
    assert by_name("step") == Step(0.4, (500, 750), 0.1)
    assert by_name("step", boundaries=[300, 600], gamma=0.2) == Step(0.4, (300, 600), 0.2)
    assert by_name("step", boundaries=250) == Step(0.4, 250)
    assert by_name("epochs") == Step(0.4, 400)
    assert by_name("every-n-epochs", epochs=3, gamma=0.5) == Step(0.4, 300, 0.5)
    assert by_name("polynomial", power=2.0) == Polynomial(0.4, 1000, 2.0)
    assert by_name("cosine", final=0.01) == Cosine(0.4, 1000, 0.01)
    assert by_name("cosine_restarts") == CosineRestarts(0.4, 334)
    assert by_name("sgdr", epochs=2, factor=2) == CosineRestarts(0.4, 200, 2)
    assert by_name("sgdr", warmup_steps=100)(400) == 0.4
    assert by_name("wsd", decay=0.1) == WarmUp(StableDecay(0.4, 1000, 0.1), 10)
    assert by_name("triangular") == Triangular(0.4, 1000, 0.2)
    assert by_name("one-cycle", rise=0.4) == OneCycle(0.4, 1000, 0.4)


@each("name", SCHEDULES)
@each("steps", [1, 2, 10])
def test_every_name_works_for_short_trainings_and_may_be_warmed_up(name, steps):
    schedule = get_schedule(name, 0.1, steps, 1)
    assert all(0 < schedule(t) <= 0.1 for t in range(steps))
    assert schedule(steps + 5) <= 0.1
    schedule = get_schedule(name, 1.0, 104, 10, warmup_steps=4)
    rises = [schedule(t) / schedule(4) for t in range(4)]
    assert rises == pytest.approx([0.2, 0.4, 0.6, 0.8], rel=1e-12)
    if name in ("cosine", "polynomial"):
        assert schedule(4) == 1
        assert schedule(54) == pytest.approx(0.5)


def test_a_function_is_a_schedule_already():
    def mine(step):
        return 0.1 / (1 + step)

    assert get_schedule(mine, 0.1, 10, 1) is mine
    assert get_schedule(mine, 0.1, 10, 1, warmup_steps=3)(0) == pytest.approx(mine(3) / 4)


def test_a_warm_up_rises_to_what_follows_on_one_clock():
    schedule = WarmUp(Step(1.0, (6,), gamma=0.1), steps=4)
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.1]
    assert [schedule(t) for t in range(7)] == pytest.approx(expected, rel=1e-12)
    assert WarmUp(Constant(0.3), 0)(0) == 0.3
    assert WarmUp(lambda step: 1 / (1 + step), steps=1)(0) == 0.25


@each(
    ("call", "words"),
    [
        (lambda: Constant(-0.1), "Constant: lr .* must be at least 0, got -0.1"),
        (lambda: Constant("0.1"), r"must be a number, got '0\.1'"),
        (lambda: Cosine(0.1, 0), "Cosine: steps must be at least 1, got 0"),
        (lambda: Cosine(0.1, 10, begin=10), "Cosine: begin must be below steps=10, got 10"),
        (lambda: CosineRestarts(0.1, 9, 0), "CosineRestarts: factor must be at least 1, got 0"),
        (lambda: Polynomial(0.1, 10, power=0), "Polynomial: power must be above 0, got 0"),
        (lambda: Step(0.1, (20, 10)), "Step: boundaries must increase"),
        (lambda: Step(0.1, 10, gamma=0), "Step: gamma must be above 0, got 0"),
        (lambda: StableDecay(0.1, 10, shape="cosin"), "unknown value of shape 'cosin'"),
        (lambda: Triangular(0.1, 10, rise=1), "Triangular: rise must be at least 0 and below 1"),
        (lambda: OneCycle(0.1, 10, start=0.5), "OneCycle: start must be at least 1, got 0.5"),
        (lambda: WarmUp(Constant(1), -1), "WarmUp: steps must be at least 0, got -1"),
        (lambda: get_schedule("cosin", 0.1, 10, 1), "unknown schedule 'cosin'; .* 'cosine'"),
        (lambda: get_schedule("cosine", 0.1, 10, 1, finale=0), "unknown option .* 'finale'"),
        (lambda: get_schedule("cosine", -0.1, 10, 1), "schedule: lr .* must be at least 0"),
        (lambda: get_schedule("cosine", 0.1, 10, 1, warmup_steps=10), "must be below the total"),
        (lambda: get_schedule("cosine", 0.1, 10, 1, warmup_steps=-1), "warmup_steps must be at l"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
