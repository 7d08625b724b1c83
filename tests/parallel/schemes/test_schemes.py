"""What every scheme keeps, by being registered."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback, Checkpointer
from pydtnn.comm import Communicator, Request, Serial, run_threads
from pydtnn.comm.wrapper import Wrapper
from pydtnn.data import Loader
from pydtnn.layers import Linear
from pydtnn.optimizers import SGD
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.schemes import SCHEMES, create_scheme
from pydtnn.testing import check_scheme
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.nonfinite import LocalNotFiniteError, NotFiniteError
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.parallel.schemes.course import (
    BATCH,
    CASES,
    OF_ANY_RULE,
    checksum,
    data,
    fit,
    train,
    trainer_of,
)
from tests.small_training import (
    Interrupt,
    Interrupted,
    Recorder,
    checksums,
    fingerprint,
    small_fit,
    small_trainer,
)

every_scheme = each(("name", "options"), CASES)


@pytest.mark.few(1)
@pytest.mark.threads(3, 4)
@pytest.mark.mpi(2)
@every_scheme
def test_ranks_hold_the_same_bytes_after_every_step_where_the_scheme_says_so(
    comm: Communicator, name: str, options: dict[str, Any]
) -> None:
    def look(trainer: Trainer) -> None:
        if exchange.equal:
            with exchange.whole():
                assert len(set(checksum(comm, trainer))) == 1

    exchange = create_scheme(name, comm, **options)
    trainer = trainer_of(exchange, SGD(0.1, momentum=0.9), callbacks=[Recorder(on_step=look)])
    fit(trainer)
    assert len(set(checksum(comm, trainer))) == 1  # after training they always do


@pytest.mark.long
@pytest.mark.threads(4)
@every_scheme
def test_every_scheme_learns(comm: Communicator, name: str, options: dict[str, Any]) -> None:
    trainer = trainer_of(create_scheme(name, comm, **options), SGD(0.3), net=Linear(3))
    first = trainer.evaluate(data())["loss"]
    fit(trainer, 10)
    last = trainer.evaluate(data())["loss"]
    assert last < 0.32 * first  # plain SGD comes to 0.24, the slowest, elastic averaging, to 0.29
    assert trainer.history[-1]["val_loss"] == pytest.approx(last, rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[1]])
def test_every_scheme_keeps_the_contract_with_options_too(
    name: str, options: dict[str, Any]
) -> None:
    check_scheme(
        lambda comm: create_scheme(name, comm, **options),
        ranks=[4],
        equal_to_serial=name in ("allreduce", "hierarchical"),
        optimizer=lambda: SGD(0.2),
    )


@pytest.mark.threads(3)
@every_scheme
def test_schemes_that_sum_gradients_can_be_compressed_and_no_others(
    comm: Communicator, name: str, options: dict[str, Any]
) -> None:
    sums = create_sums("sign")
    if not SCHEMES[name].sums_gradients:
        with pytest.raises(ValueError, match="ranks do not sum gradients"):
            create_scheme(name, comm, sums=sums, **options)
        return
    trainer = trainer_of(create_scheme(name, comm, sums=sums, **options), SGD(0.3), net=Linear(3))
    fit(trainer, 10)
    # Without compression all come to 0.30, and with one bit per number and error feedback, too.
    assert trainer.evaluate(data())["loss"] < 0.32
    assert len(set(checksum(comm, trainer))) == 1


class Noting(Wrapper):
    """Knows which requests their owner has not seen complete."""

    def __init__(self, inner: Communicator, open_: set[Request] | None = None) -> None:
        super().__init__(inner)
        self.open = set() if open_ is None else open_

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        request = Noted(call(*args), self.open)
        self.open.add(request)
        return request

    def wrapped(self, group: Communicator) -> Communicator:
        return Noting(group, self.open)


class Noted(Request):
    def __init__(self, inner: Request, open_: set[Request]) -> None:
        self.inner, self.open = inner, open_

    def wait(self) -> None:
        self.inner.wait()
        self.open.discard(self)

    def test(self) -> bool:
        if done := self.inner.test():
            self.open.discard(self)
        return done


@pytest.mark.few(1)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@every_scheme
def test_a_step_that_is_abandoned_leaves_nothing_under_way_and_no_trace(
    comm: Communicator, name: str, options: dict[str, Any]
) -> None:
    def run(bad_step: int) -> bytes:
        noting = Noting(comm)
        trainer = trainer_of(create_scheme(name, noting, **options), SGD(0.1, momentum=0.9))
        trainer.exchange.start(trainer.model.buckets)
        loader = Loader(
            data(),
            global_batch_size=BATCH,
            rank=comm.rank,
            size=comm.size,
            dtype="float64",
            prefetch=0,
        )
        for step, batch in enumerate(loader.epoch(0)):
            if step == bad_step:
                own = trainer.setup.own_losses  # then a loss is the error of its rank alone
                bad = replace(batch, x=batch.x * (np.nan if own or comm.rank == 0 else 1))
                with pytest.raises(LocalNotFiniteError if own else NotFiniteError):
                    trainer.train_step(bad)
                # received `staleness` or `delay` steps later
                assert not noting.open or name in ("stale_synchronous", "streaming_diloco")
            trainer.train_step(batch)
        trainer.evaluate(data())
        assert not noting.open
        return checksum(comm, trainer)[comm.rank]

    assert run(bad_step=3) == run(bad_step=-1)


@pytest.fixture
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to memory only: what survives a power failure is not the subject here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.few(1)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@pytest.mark.usefixtures("_quick_disk")
@every_scheme
def test_a_run_that_is_resumed_ends_in_the_same_bytes(
    comm: Communicator, name: str, options: dict[str, Any], shared_path: Path
) -> None:
    """The run has batch norm, dropout and augmentation; it is interrupted within an epoch."""

    own = shared_path / "-".join(map(str, (name, *options.values())))

    def build(folder: str, *further: Callback) -> Trainer:
        saving = Checkpointer(own / folder, every_steps=1)
        exchange = create_scheme(name, comm, **options)
        return small_trainer(comm, saving, *further, exchange=exchange)

    whole = build("whole")
    small_fit(whole)
    with pytest.raises(Interrupted):
        small_fit(build("parts", Interrupt(6)))
    resumed = build("parts")
    load_checkpoint(own / "parts", resumed)
    assert resumed.optimizer.iterations == 6
    small_fit(resumed)
    assert fingerprint(resumed) == fingerprint(whole)
    assert checksums(resumed.exchange.state()) == checksums(whole.exchange.state())
    comm.barrier()


@each("name", SCHEMES)
def test_a_scheme_says_in_one_sentence_what_it_does_not_know(name: str) -> None:
    with pytest.raises(ValueError, match=f"^unknown option of {name} 'perod'[^\n]*$"):
        create_scheme(name, Serial(), perod=3)
    with pytest.raises(ValueError, match="^unknown option of .* 'perod'[^\n]*$"):
        SCHEMES[name](Serial(), perod=3)


@each(
    ("name", "options", "sentence"),
    [
        ("locals_gd", {}, "unknown scheme 'locals_gd'; did you mean 'local_sgd'"),
        ("local_sgd", {"perod": 3}, "unknown option of local_sgd 'perod'; did you mean 'period'?"),
        ("local_sgd", {"period": 0}, "LocalSGD: period must be at least 1, got 0"),
        (
            *("local_sgd", {"period": 2.0}),
            'scheme local_sgd {"period": 2.0}: LocalSGD: period must be a whole number, got 2.0',
        ),
        ("post_local_sgd", {"after": -1}, "PostLocalSGD: after must be at least 0, got -1"),
        ("elastic", {"beta": 1.5}, "ElasticAveraging: beta must be above 0 and at most 1, got 1.5"),
        (
            *("gossip", {"graph": "rign"}),
            "Gossip: unknown value of graph 'rign'; did you mean 'ring'?",
        ),
        ("gossip", {"graph": 3}, 'scheme gossip {"graph": 3}: Gossip: graph must be text, got 3'),
        ("stale", {"delay": -1}, "StaleGradients: delay must be at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        create_scheme(name, Serial(), **options)
    assert str(error.value).startswith(sentence)


def test_a_scheme_is_found_whatever_the_capitals() -> None:
    assert create_scheme("Local-SGD", Serial(), period=2).period == 2


def test_options_of_one_scheme_are_not_those_of_another() -> None:
    first, second = (create_scheme("local_sgd", Serial(), **o) for o in ({"period": 3}, {}))
    assert (first.period, second.period) == (3, 8)
    second.period = 5
    assert first.period == 3


@each("name", [n for n in OF_ANY_RULE if SCHEMES[n].equal])
def test_accumulation_changes_nothing(name: str) -> None:
    def rank(comm: Communicator, accumulation: int) -> dict[str, np.ndarray]:
        return train(create_scheme(name, comm), SGD(0.1), accumulation=accumulation)

    once, thrice = (run_threads(2, rank, accumulation) for accumulation in (1, 3))
    for name, value in once[0].items():
        np.testing.assert_allclose(thrice[0][name], value, rtol=1e-12, atol=1e-12)
