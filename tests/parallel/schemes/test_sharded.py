"""The sharded optimizer computes what all-reduce does, with a part of its state on each rank."""

import numpy as np
import pytest

from pydtnn.optimizers import LAMB
from pydtnn.parallel.schemes import ShardedOptimizer
from tests.parallel.schemes.course import RULES, assert_close, train, train_serially, trainer_of


@pytest.mark.threads(1, 2, 3)
def test_rules_that_need_whole_parameters_get_them(comm):
    trainer = trainer_of(ShardedOptimizer(comm), LAMB(), bucket_bytes=400)
    loads = np.zeros(comm.size, int)
    for bucket in trainer.model.buckets:
        own = trainer.exchange.local_slice(bucket)
        for entry in bucket.parameters:
            inside = own.start <= entry.slice.start and entry.slice.stop <= own.stop
            assert sum(comm.gather_object(inside)) == 1
        loads += trainer.exchange.counts[bucket.index]
    largest = max(b.values.size for b in trainer.model.buckets)
    assert loads.max() - loads.min() <= largest


@pytest.mark.few(4)
@pytest.mark.threads(1, 3, 5)
@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("rule", "bucket_bytes"), [*zip(RULES, [300, 1, 1 << 20, 1, 300, 300, 1, 1 << 20], strict=True)]
)
def test_every_rule_computes_what_it_does_serially(comm, rule, bucket_bytes):
    ours = train(ShardedOptimizer(comm), RULES[rule](), 2, bucket_bytes=bucket_bytes)
    assert_close(ours, train_serially(RULES[rule](), 2))
