"""Several `fit`s of one trainer: training goes on, and groups of ranks are made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.comm.wrapper import Wrapper
from pydtnn.optimizers import SGD
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import begin
from pydtnn.parallel.schemes import ElasticAveraging, LocalSGD, create_scheme
from tests.each import each
from tests.parallel.schemes.course import OF_ANY_RULE, checksum, data, fit, trainer_of
from tests.small_training import Interrupt, Interrupted

CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("allreduce", {}, None),
    ("allreduce", {}, "top_k"),
    ("allreduce", {}, "power_sgd"),
    ("sharded", {}, "sign"),
    ("stale", {"delay": 1}, None),
    ("stale", {"delay": 3}, "top_k"),
]


class Counted(Wrapper):
    """Counts groups that are made and those that are freed, in lists that all groups share."""

    def __init__(self, inner: Communicator, made: list[Any], freed: list[Any]) -> None:
        super().__init__(inner)
        self.made, self.freed = made, freed

    def _split(self, color: int, key: int) -> Communicator:
        group = Counted(self.inner._split(color, key), self.made, self.freed)
        self.made.append(group)
        return group

    def free(self) -> None:
        if self not in self.freed:
            self.freed.append(self)


@pytest.mark.threads(3)
@each("name", OF_ANY_RULE, few=5)
def test_a_fit_begins_from_the_parameters_of_rank_0(comm, name):
    """Rank 0 alone loads other weights between two fits: all ranks go on from these."""
    trainer = trainer_of(create_scheme(name, comm), SGD(0.0))
    fit(trainer, 1)
    if comm.rank == 0:
        for bucket in trainer.model.buckets:
            bucket.values[...] = np.where(bucket.values != 0, 0.25, 0)
    fit(trainer, 2)  # with a learning rate of 0, so that nothing else moves them
    assert len(set(checksum(comm, trainer))) == 1
    for bucket in trainer.model.buckets:
        assert set(np.unique(bucket.values)) <= {0, 0.25}


@pytest.mark.threads(2)
def test_the_centre_of_elastic_averaging_follows_weights_that_are_loaded(comm):
    trainer = trainer_of(ElasticAveraging(comm, period=1), SGD(0.1))
    fit(trainer, 1)
    for bucket in trainer.model.buckets:
        bucket.values[...] = 0
    begin(trainer.exchange, trainer.model.buckets)
    assert not any(centre.any() for centre in trainer.exchange.centre)


@pytest.mark.threads(2)
def test_samples_of_a_fit_that_was_interrupted_do_not_count(comm):
    trainer = trainer_of(LocalSGD(comm, period=50), SGD(0.1), callbacks=[Interrupt(2)])
    with pytest.raises(Interrupted):
        trainer.fit(data(), epochs=1, global_batch_size=9)
    assert trainer.exchange.samples > 0
    begin(trainer.exchange, trainer.model.buckets)
    assert trainer.exchange.samples == 0
    assert len(set(checksum(comm, trainer))) == 1


@pytest.mark.few(2)
@pytest.mark.threads(3)
@pytest.mark.parametrize(("name", "options", "compress"), CASES, ids=str)
def test_four_fits_are_one_of_four_epochs_and_make_groups_once(comm, name, options, compress):
    made: list[Any] = []
    freed: list[Any] = []
    results = []
    for stops in ([4], [1, 2, 3, 4]):
        del made[:], freed[:]
        sums = {} if compress is None else {"sums": create_sums(compress)}
        exchange = create_scheme(name, Counted(comm, made, freed), **options, **sums)
        trainer = trainer_of(exchange, SGD(0.1, momentum=0.9))
        for epochs in stops:
            fit(trainer, epochs)
        results.append([bucket.values.tobytes() for bucket in trainer.model.buckets])
    assert results[0] == results[1]
    other, groups = trainer_of(exchange, SGD(0.1)), len(made)
    fit(other, 1)
    assert len(made) == groups
    assert not freed
    exchange.free()
    exchange.free()
    assert set(freed) == set(made)
    fit(other, 2)  # a closed exchange can be used again
    assert len(made) == 2 * groups
