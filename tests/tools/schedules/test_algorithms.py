"""Every algorithm gives every rank the sum, in the rounds and bytes that its docstring names."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from pydtnn.comm.schedules import SCHEDULES
from pydtnn.tools.schedules.check import associations, check
from pydtnn.tools.schedules.timeline import MatchedPlan
from tests.each import each

RANKS = range(1, 18)
POWERS = (1, 2, 4, 8, 16)

LAYOUTS = {
    "all on one host": lambda rank: 0,
    "a host each": lambda rank: rank,
    "two to a host": lambda rank: rank // 2,
    "dealt out to three hosts": lambda rank: rank % 3,
    "one, one and the rest": lambda rank: "abc"[min(rank, 2)],
    "scattered unevenly": lambda rank: rank * rank % 5,
}


def sent(done: MatchedPlan, size: int) -> list[Fraction]:
    """What each rank sends, in arrays."""
    volume = [Fraction(0)] * size
    for message in done.messages:
        volume[message.sender] += message.part.stop - message.part.start
    return volume


@each("p", RANKS, few=49)
@each("name", SCHEDULES)
def test_every_algorithm_is_right_for_1_to_17_ranks(name, p):
    layout = [*LAYOUTS.values()][(p + [*SCHEDULES].index(name)) % len(LAYOUTS)]
    check(name, [layout(rank) for rank in range(p)])


# -- rounds and bytes ------------------------------------------------------------------------------

LOG = {p: (p - 1).bit_length() for p in RANKS}  # rounded up
SOME = (1, 2, 3, 5, 8, 17)
EXPECTED_ROUNDS = {
    "ring": {p: 2 * (p - 1) for p in SOME},
    "bidirectional_ring": {p: 2 * (p - 1) for p in SOME},
    "recursive_doubling": {p: LOG[p] for p in POWERS} | {5: 4, 6: 4, 7: 4, 9: 5, 17: 6},
    "halving_doubling": {p: 2 * LOG[p] for p in POWERS} | {5: 6, 6: 6, 7: 6, 9: 8, 17: 10},
    "binomial_tree": {p: 2 * LOG[p] for p in SOME},
    "fixed_tree": {p: 2 * LOG[p] for p in SOME},
    "direct": {p: 2 for p in SOME if p > 1},
    "torus": {1: 0, 2: 2, 4: 4, 6: 6, 7: 12, 8: 8, 9: 8, 12: 10, 13: 24, 15: 12, 16: 12},
    "hierarchical": {1: 0, 2: 2, 3: 4, 4: 4, 5: 8, 7: 12, 8: 6, 16: 8},  # a host each
}


@each("name", SCHEDULES)
def test_an_algorithm_takes_as_many_rounds_as_its_docstring_says(name):
    assert {p: check(name, p).rows for p in EXPECTED_ROUNDS[name]} == EXPECTED_ROUNDS[name]


def test_every_rank_sends_the_least_possible():
    least = {p: [Fraction(2 * (p - 1), p)] * p for p in (1, 2, 4, 7, 8, 15, 16)}
    for name in ("ring", "bidirectional_ring", "direct", "torus"):
        assert {p: sent(check(name, p), p) for p in least} == least
    for name in ("halving_doubling", "fixed_tree"):
        assert all(sent(check(name, p), p) == least[p] for p in POWERS)
    assert all(max(sent(check("fixed_tree", p), p)) <= 2 for p in (3, 6, 11, 23, 39))


def test_a_bidirectional_ring_sends_as_much_to_the_left_as_to_the_right():
    volume = Counter()
    for message in check("bidirectional_ring", 5).messages:
        volume[(message.receiver - message.sender) % 5] += message.part.stop - message.part.start
    assert volume == {1: 5 * Fraction(4, 5), 4: 5 * Fraction(4, 5)}


@each("hosts", [(0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 0, 2, 2, 0, 1)])
def test_the_hierarchical_schedule_crosses_between_hosts_as_seldom_as_one_rank_a_host(hosts):
    volume = Counter()
    for message in check("hierarchical", hosts).messages:
        if hosts[message.sender] != hosts[message.receiver]:
            volume[hosts[message.sender]] += message.part.stop - message.part.start
    h = len(set(hosts))
    assert set(volume.values()) == {Fraction(2 * (h - 1), h)}


def test_the_torus_speaks_along_rows_and_columns_only():
    neighbours = {(m.sender, m.receiver) for m in check("torus", 6).messages}  # 2 rows of 3
    rows = {(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)}
    columns = {(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)}
    assert neighbours == rows | columns


# -- order of summation ----------------------------------------------------------------------------


def aligned_tree(first: int, stop: int, block: int) -> str:
    """The sum of ranks `first` to `stop` - 1 over aligned blocks of `block` and smaller ones."""
    if block == 1:
        return str(first)
    middle = first + block // 2
    left = aligned_tree(first, min(middle, stop), block // 2)
    return f"({left} + {aligned_tree(middle, stop, block // 2)})" if middle < stop else left


def test_the_fixed_tree_adds_every_element_in_one_tree_of_aligned_blocks():
    for p in RANKS:
        assert associations("fixed_tree", p) == {aligned_tree(0, p, 32)}
    assert associations("fixed_tree", (0, 0, 1, 2, 1)) == associations("fixed_tree", 5)


@each("name", ["recursive_doubling", "halving_doubling"])
def test_doubling_forms_the_fixed_tree_between_2_to_the_k_ranks_only(name):
    for p in POWERS:
        assert associations(name, p) == associations("fixed_tree", p)
    assert associations(name, 5) != associations("fixed_tree", 5)
