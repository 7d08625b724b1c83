"""The checker names the round and the ranks of what is wrong, and accepts what is right."""

from fractions import Fraction

import pytest

from pydtnn.comm.schedules import SCHEDULES
from pydtnn.comm.schedules.algorithms import ring
from pydtnn.comm.schedules.steps import ALL, MessageStep, Part, add, part, receive, send
from pydtnn.tools.schedules.check import ScheduleError, associations, check, plan
from tests.each import each

FIRST, SECOND = part(0, 2), part(1, 2)


def ring_that_adds_on_the_way_round_again(group):
    for k, steps in enumerate(ring(group)):
        yield tuple(step._replace(op="sum") if k == 3 and step.receive else step for step in steps)


def ring_that_sends_one_part_too_far_ahead(group):
    r, p = group.rank, group.size
    for k in range(p - 1):
        yield send((r + 1) % p, part(r - k + 1, p)), add((r - 1) % p, part(r - k - 1, p))


def ring_that_sends_before_it_receives(group):
    for to_the_right, from_the_left in ring(group):
        yield (to_the_right,)
        yield (from_the_left,)


def doubling_without_folding(group):
    for distance in (1, 2):
        yield send(group.rank ^ distance, ALL), add(group.rank ^ distance, ALL)


def sends(first, last):
    """A step with a part that is none."""
    return [[(send(1, Part(first, last)),)], []]


HALF = Fraction(1, 2)
BROKEN = [
    (
        (ring_that_adds_on_the_way_round_again, 4),
        r"^round 3 of rank 0 adds \[3/4, 1\) from rank 3, .* includes the contribution of rank 0;",
    ),
    (
        (ring_that_sends_one_part_too_far_ahead, 3),
        r"^round 0 of rank 2 sends \[0, 1/3\) to rank 0, whose round 0 expects \[2/3, 1\); use",
    ),
    (
        (ring_that_sends_before_it_receives, 3),
        "^deadlock: round 0 of rank 0 waits for round 1 of rank 1, .* send and receive in the same",
    ),
    ((doubling_without_folding, 3), "^round 1 of rank 1 .* other 2 ranks of the group .* got 3"),
    (
        ([[(add(1, ALL),)], []],),
        r"^round 0 of rank 0 receives \[0, 1\) from rank 1, which sends no",
    ),
    (
        ([[(send(1, FIRST), add(1, FIRST))], [(send(0, FIRST), add(0, FIRST))]],),
        r"^rank 0 lacks .* of rank 1 to \[1/2, 1\) after round 0, the last, which no round writes",
    ),
    (
        ([[(receive(1, ALL), add(2, SECOND))], [(send(0, ALL),)], [(send(0, SECOND),)]],),
        r"^round 0 of rank 0 receives \[0, 1\) from rank 1 and \[1/2, 1\) from rank 2, which over",
    ),
    (
        ([[(send(1, ALL), receive(1, ALL))], [(send(0, ALL), receive(0, ALL))]],),
        r"^round 0 of rank 0 copies \[0, 1\) from rank 1 over \[0, 1\), which it is sending",
    ),
    (([[(MessageStep(1, None, ALL, "max"),)], [(send(0, ALL),)]],), "op must be 'sum' or 'copy'"),
    (
        ([[], [(MessageStep(0, None, None, "copy"),)]],),
        "^round 0 of rank 1 has a step with rank 0 that neither sends nor receives; remove it",
    ),
    ((sends(HALF, Fraction(3, 2)),), r"a part must be a non-empty interval .*, got \[1/2, 3/2\)"),
    ((sends(0.0, 0.1),), r"a part must be .* with exact fractions, got \[0.0, 0.1\)"),
    (
        (
            [
                [(add(1, ALL), add(2, ALL)), ()],
                [(send(0, ALL), send(2, ALL)), ()],
                [(add(1, ALL),), (send(0, ALL),)],
            ],
        ),
        r"^round 0 of rank 0 adds \[0, 1\) from rank 2, .* the contribution of rank 1; add each",
    ),
]


@each(("given", "sentence"), BROKEN)
def test_a_broken_algorithm_is_rejected_with_the_round_and_the_ranks(given, sentence):
    with pytest.raises(ScheduleError, match=sentence) as error:
        check(*given)
    assert "\n" not in str(error.value)


@each("name", SCHEDULES)
def test_no_step_of_an_algorithm_can_be_left_out(name):
    ranks = plan(name, [0, 0, 1, 1, 2])
    for rank, its_rounds in enumerate(ranks):
        for k, steps in enumerate(its_rounds):
            for i in range(len(steps)):
                without = [*its_rounds[:k], steps[:i] + steps[i + 1 :], *its_rounds[k + 1 :]]
                with pytest.raises(ScheduleError):
                    check([*ranks[:rank], without, *ranks[rank + 1 :]])


def test_messages_of_two_rounds_between_the_same_ranks_keep_their_order():
    check(
        [
            [(send(1, FIRST), add(1, FIRST)), (send(1, SECOND), add(1, SECOND))],
            [(add(0, FIRST), send(0, FIRST), add(0, SECOND), send(0, SECOND))],
        ]
    )


def test_a_rank_that_has_less_to_do_may_fall_behind_or_go_ahead():
    check(
        [
            [(add(1, ALL),), (add(2, ALL),), (send(1, ALL), send(2, ALL))],
            [(send(0, ALL),), (receive(0, ALL),)],
            [(), (), (send(0, ALL),), (receive(0, ALL),)],
        ]
    )


def test_several_sums_into_one_part_are_added_in_the_order_of_the_steps():
    def all_to_all(order):
        return [
            [tuple(word(peer, ALL) for peer in order if peer != rank for word in (send, add))]
            for rank in range(4)
        ]

    assert "(((0 + 1) + 2) + 3)" in associations(all_to_all([1, 2, 3, 0]))
    assert "(((0 + 3) + 2) + 1)" in associations(all_to_all([3, 2, 1, 0]))


def test_the_rounds_of_all_ranks_may_be_given_as_they_are():
    assert check(plan("ring", 3)) == check("ring", 3) == check(ring, ["a", "b", "c"])
