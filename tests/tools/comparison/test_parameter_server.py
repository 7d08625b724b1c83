"""The parameter server computes what all-reduce does, by messages to and from servers."""

import numpy as np
import pytest

from pydtnn.optimizers import Adam
from pydtnn.tools.comparison import ParameterServer
from tests.parallel.schemes.course import RULES, assert_close, train, train_serially, trainer_of


@pytest.mark.threads(2, 3)
def test_each_bucket_has_one_server_and_servers_have_as_much(comm):
    trainer = trainer_of(ParameterServer(comm), Adam(), bucket_bytes=1)
    served = np.zeros(comm.size, int)
    for bucket in trainer.model.buckets:
        counts = np.array(trainer.exchange.counts[bucket.index])
        assert sorted(counts)[-1] == counts.sum() == len(bucket.values)
        slots = trainer.optimizer._slots[bucket.index]
        assert {slot.size for slot in slots} == {counts[comm.rank]}
        served += counts
    assert served.max() - served.min() <= max(len(b.values) for b in trainer.model.buckets)


@pytest.mark.threads(3)
def test_a_step_is_a_push_and_a_pull_of_each_bucket_by_each_worker(comm):
    exchange = ParameterServer(comm)
    trainer = trainer_of(exchange, Adam())
    exchange.start(trainer.model.buckets)
    before = exchange.comm.traffic.messages
    for bucket in exchange.buckets:
        exchange.bucket_ready(bucket)
    exchange.update(trainer.optimizer)
    served = sum(exchange.servers[bucket.index] == comm.rank for bucket in exchange.buckets)
    pushes = len(exchange.buckets) - served
    pulls = served * (comm.size - 1)
    assert exchange.comm.traffic.messages - before == pushes + pulls


@pytest.mark.few(4)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("rule", "bucket_bytes"), [*zip(RULES, [300, 1, 1 << 20, 1, 300, 300, 1, 1 << 20], strict=True)]
)  # more and fewer than servers
def test_every_rule_computes_what_it_does_serially(comm, rule, bucket_bytes):
    ours = train(ParameterServer(comm), RULES[rule](), 2, bucket_bytes=bucket_bytes)
    assert_close(ours, train_serially(RULES[rule](), 2))
