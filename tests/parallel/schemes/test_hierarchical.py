"""Hierarchical all-reduce: the same sums, with one message per host between hosts."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import Hierarchical
from tests.each import each
from tests.parallel.schemes.course import (
    RULES,
    assert_close,
    fit,
    train,
    train_serially,
    trainer_of,
)

LAYOUTS = ["a", "ab", "aab", "aabb", "abab", "abcd", "aaaab", "abbca"]
"""The host of each rank: alone, together, unevenly, in turns."""


@pytest.mark.few(6)
@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rule", ["momentum", "clipped"])
def test_any_layout_of_hosts_trains_as_one_rank(hosts: str, overlap: bool, rule: str) -> None:
    def rank(comm: Communicator):
        return train(Hierarchical(comm, overlap=overlap), RULES[rule](), 2)

    expected = train_serially(RULES[rule](), 2)
    results = run_threads(len(hosts), rank, hosts=list(hosts))
    for ours in results:
        assert_close(ours, expected)
        for name, value in results[0].items():
            np.testing.assert_array_equal(ours[name], value)


@pytest.mark.few(5)
@pytest.mark.threads(1, 2, 3)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("rule", RULES)
def test_ranks_of_one_host_compute_what_one_does(comm: Communicator, rule: str) -> None:
    ours = train(Hierarchical(comm), RULES[rule](), 2)
    assert_close(ours, train_serially(RULES[rule](), 2))


@each("hosts", LAYOUTS)
def test_one_rank_of_each_host_leads_it(hosts: str) -> None:
    def rank(comm: Communicator) -> tuple[bool, int]:
        exchange = Hierarchical(comm)
        exchange.start(trainer_of(exchange, SGD(0.1)).model.buckets)
        return exchange.leads, exchange.leaders.size

    found = run_threads(len(hosts), rank, hosts=list(hosts))
    assert [leads for leads, _ in found] == [hosts.index(h) == r for r, h in enumerate(hosts)]
    assert {size for leads, size in found if leads} == {len(set(hosts))}


def test_training_twice_asks_for_groups_once() -> None:
    def rank(comm: Communicator) -> None:
        trainer = trainer_of(Hierarchical(comm), SGD(0.1))
        fit(trainer, 1)
        host = trainer.exchange.host
        fit(trainer, 2)
        assert trainer.exchange.host is host

    run_threads(4, rank, hosts=list("aabb"))
