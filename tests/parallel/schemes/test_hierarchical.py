"""Hierarchical all-reduce: the same sums, with one message per host between hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.parallel.schemes import Hierarchical
from tests.parallel.schemes.course import (
    RULES,
    assert_close,
    train,
    train_serially,
)


@pytest.mark.few(6)
@pytest.mark.parametrize("hosts", ["a", "aaa", "aab", "abab", "abcd", "abbca"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rule", ["momentum", "clipped"])
def test_any_layout_of_hosts_trains_as_one_rank_and_one_of_each_host_leads(hosts, overlap, rule):
    def rank(comm: Communicator) -> Any:
        exchange = Hierarchical(comm, overlap=overlap)
        trained = train(exchange, RULES[rule](), 2)
        return trained, exchange.leads, exchange.leaders.size

    expected = train_serially(RULES[rule](), 2)
    results = run_threads(len(hosts), rank, hosts=list(hosts))
    for ours, _, _ in results:
        assert_close(ours, expected)
        for name, value in results[0][0].items():
            np.testing.assert_array_equal(ours[name], value)
    leads = [hosts.index(host) == r for r, host in enumerate(hosts)]
    assert [one for _, one, _ in results] == leads
    assert {size for _, one, size in results if one} == {len(set(hosts))}
