"""What every scheme keeps, by being registered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.comm import Serial, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import gather_parameters
from pydtnn.parallel.schemes import SCHEMES, create_scheme
from pydtnn.tools.testing import check_scheme
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import LocalNotFiniteError, NotFiniteError
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.parallel.schemes.course import BATCH, CASES, checksum, data, train, trainer_of
from tests.small_training import Recorder, checksums, fingerprint, small_fit, small_trainer

every_scheme = each(("name", "options"), CASES, few=7)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[1]])
def test_every_scheme_keeps_the_contract_with_options_too(name, options):
    check_scheme(
        lambda comm: create_scheme(name, comm, **options),
        ranks=[4],
        equal_to_serial=name == "allreduce",
        optimizer=lambda: SGD(0.2),
    )


@pytest.mark.few(1)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@every_scheme
def test_ranks_are_equal_where_the_scheme_says_so_and_a_resumed_run_ends_in_the_same_bytes(
    comm, name, options, shared_path
):
    """The run has batch norm, dropout and augmentation; it is saved within an epoch."""
    own = shared_path / "-".join(map(str, (name, *options.values())))

    def look(trainer: Trainer) -> None:
        if trainer.exchange.equal:
            gather_parameters(trainer.exchange)
            assert len(set(checksum(comm, trainer))) == 1
        if trainer.optimizer.iterations == 6:
            save_checkpoint(own, trainer)

    def build(*callbacks: Callback) -> Trainer:
        return small_trainer(comm, *callbacks, exchange=create_scheme(name, comm, **options))

    whole = build(Recorder(on_step=look))
    small_fit(whole)
    assert len(set(checksum(comm, whole))) == 1  # after training they always are
    resumed = build()
    load_checkpoint(own, resumed)
    assert resumed.optimizer.iterations == 6
    small_fit(resumed)
    assert fingerprint(resumed) == fingerprint(whole)
    assert checksums(resumed.exchange.state()) == checksums(whole.exchange.state())
    comm.barrier()


@pytest.mark.few(1)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@every_scheme
def test_a_step_that_is_abandoned_leaves_no_trace(comm, name, options):
    def run(bad_step: int) -> bytes:
        trainer = trainer_of(create_scheme(name, comm, **options), SGD(0.1, momentum=0.9))
        trainer.exchange.start(trainer.model.buckets)
        loader = trainer.setup.loader(data(), BATCH, comm.size, prefetch=0)
        for step, batch in enumerate(loader.epoch(0)):
            if step == bad_step:
                own = trainer.setup.own_losses  # then a loss is the error of its rank alone
                bad = replace(batch, x=batch.x * (np.nan if own or comm.rank == 0 else 1))
                with pytest.raises(LocalNotFiniteError if own else NotFiniteError):
                    trainer.train_step(bad)
            trainer.train_step(batch)
        trainer.evaluate(data())
        return checksum(comm, trainer)[comm.rank]

    assert run(bad_step=3) == run(bad_step=-1)


@each("name", SCHEMES)
def test_schemes_that_sum_gradients_can_be_compressed_and_no_others(name):
    sums = create_sums("sign")
    if SCHEMES[name].sums_gradients:
        (trained,) = run_threads(1, lambda comm: train(create_scheme(name, comm, sums=sums), SGD()))
        plain = train(create_scheme(name, Serial()), SGD())
        assert any((trained[key] != plain[key]).any() for key in plain)
    else:
        with pytest.raises(ValueError, match="ranks do not sum gradients"):
            train(create_scheme(name, Serial(), sums=sums), SGD())


@each(
    ("name", "options", "words"),
    [
        ("locals_gd", {}, "unknown scheme 'locals_gd'; did you mean 'local_sgd'"),
        *((name, {"perod": 3}, f"^unknown option of {name} 'perod'[^\n]*$") for name in SCHEMES),
        ("local_sgd", {"period": 0}, "LocalSGD: period must be at least 1, got 0"),
        ("local_sgd", {"period": 2.0}, "LocalSGD: period must be a whole number, got 2.0"),
        ("post_local_sgd", {"after": -1}, "PostLocalSGD: after must be at least 0, got -1"),
        ("elastic", {"beta": 1.5}, "ElasticAveraging: beta must be above 0 and at most 1"),
        ("gossip", {"graph": "rign"}, "Gossip: unknown value of graph 'rign'; .* 'ring'"),
        ("stale", {"delay": -1}, "StaleGradients: delay must be at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused(name, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        create_scheme(name, Serial(), **options)


def test_names_have_any_capitals_and_options_of_one_scheme_are_not_those_of_another():
    first, second = (create_scheme("Local-SGD", Serial(), **o) for o in ({"period": 3}, {}))
    assert (first.period, second.period) == (3, 8)
    second.period = 5
    assert first.period == 3
