"""A run that is interrupted and resumed ends in the same bytes as one that is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pydtnn.callbacks import (
    BestWeights,
    Callback,
    Checkpointer,
    EarlyStopping,
    HistoryWriter,
    ReduceOnPlateau,
)
from pydtnn.comm import Communicator, Serial
from pydtnn.comm.monitor.supervision import supervise_alone
from pydtnn.optimizers import SGD, Adam, Adam8bit, Optimizer, ScheduleFreeAdamW
from pydtnn.schedules import Constant, Cosine, WarmUp
from pydtnn.training.checkpoint import find_checkpoints, load_checkpoint
from pydtnn.training.trainer import Trainer
from pydtnn.utils import errors
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import (
    STEPS,
    Interrupt,
    Interrupted,
    Recorder,
    checksums,
    fingerprint,
    small_data,
    small_fit,
    small_model,
    small_trainer,
)

EPOCHS = 3

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: SGD(Cosine(0.1, 12), momentum=0.9, weight_decay=1e-3, clip_norm=1.0),
    "adam": lambda: Adam(Cosine(0.01, 12)),
    "adam8bit": lambda: Adam8bit(Cosine(0.01, 12)),
    "schedule_free": lambda: ScheduleFreeAdamW(WarmUp(Constant(0.01), 3)),
}


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to memory only: what survives a power failure is not the subject here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def build(
    comm: Communicator,
    directory: Path,
    *further: Callback,
    optimizer: str = "momentum",
    **checkpoints: Any,
) -> Trainer:
    return small_trainer(
        comm,
        ReduceOnPlateau("val_loss", 0.5, 1, min_delta=9),  # so much that both count every epoch
        EarlyStopping("val_loss", 9, min_delta=9),
        HistoryWriter(directory),
        BestWeights(directory / "best.safetensors"),
        Checkpointer(directory, **checkpoints),
        *further,
        model=small_model(seed=2),
        optimizer=OPTIMIZERS[optimizer](),
    )


def files(directory: Path) -> dict[str, bytes]:
    """What a run leaves, checkpoints included, by path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_run_that_dies_between_checkpoints_repeats_the_steps_since(tmp_path):
    whole = build(Serial(), tmp_path / "whole")
    small_fit(whole, EPOCHS)
    with pytest.raises(Interrupted):
        small_fit(build(Serial(), tmp_path / "parts", Interrupt(STEPS + 2)), EPOCHS)
    resumed = build(Serial(), tmp_path / "parts")
    load_checkpoint(tmp_path / "parts", resumed)
    assert resumed.optimizer.iterations == STEPS
    small_fit(resumed, EPOCHS)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def resumed_at(steps: Sequence[int], comm: Communicator, folder: Path, **options: Any) -> Trainer:
    """Train in parts that are interrupted after some steps, and compare with a whole run."""
    whole = build(comm, folder / "whole", every_steps=1, **options)
    small_fit(whole, EPOCHS)
    for at in steps:
        trainer = build(comm, folder / "parts", Interrupt(at), every_steps=1, **options)
        load_checkpoint(folder / "parts", trainer)
        with pytest.raises(Interrupted):
            small_fit(trainer, EPOCHS)
    resumed = build(comm, folder / "parts", every_steps=1, **options)
    assert load_checkpoint(folder / "parts", resumed) is not None
    assert resumed.optimizer.iterations == steps[-1]
    small_fit(resumed, EPOCHS)
    assert fingerprint(resumed) == fingerprint(whole)
    assert files(folder / "parts") == files(folder / "whole")
    return resumed


@each(
    ("steps", "optimizer"),
    [
        ([1], "momentum"),
        ([STEPS - 1], "adam8bit"),
        ([STEPS], "momentum"),
        ([STEPS + 1, 2 * STEPS + 2], "adam"),
        ([STEPS + 1], "schedule_free"),
    ],
    few=2,
)
def test_a_serial_run_ends_in_the_same_bytes_from_any_step(steps, optimizer, tmp_path):
    resumed = resumed_at(steps, Serial(), tmp_path, optimizer=optimizer)
    plain = build(Serial(), tmp_path, optimizer=optimizer)
    plain.callbacks.pop()
    small_fit(plain, EPOCHS)
    assert plain.history == resumed.history


@pytest.mark.threads(3)
@pytest.mark.mpi(2)
def test_a_run_of_several_ranks_ends_in_the_same_bytes(comm, shared_path):
    resumed = resumed_at([STEPS - 1, STEPS + 2], comm, shared_path)
    prints = comm.gather_object(fingerprint(resumed))
    assert all(other == prints[0] for other in prints)
    comm.barrier()


def test_sums_of_other_metrics_are_not_continued(tmp_path):
    small_fit(build(Serial(), tmp_path), 1)
    other = build(Serial(), tmp_path)
    other.objective.names = ("loss",)
    other.totals = other.setup.new_totals()
    with pytest.raises(
        AgreedError, match="metrics must be loss, accuracy, as in .*, got loss; continue with"
    ):
        load_checkpoint(tmp_path, other)


def test_training_that_was_stopped_can_be_taken_up_again():
    def stop(trainer: Trainer) -> None:
        trainer.stop = trainer.epoch == 1

    trainer = small_trainer(Serial(), Recorder(on_epoch=stop))
    assert [len(small_fit(trainer, EPOCHS)) for _ in range(2)] == [1, EPOCHS]


class Signalled(Callback):
    """Receives a signal after a number of steps, or in an evaluation."""

    def __init__(self, supervision: Any, after: int) -> None:
        self.supervision, self.after, self.interrupted = supervision, after, 0

    def on_step_end(self, trainer: Any) -> None:
        self.after -= 1
        if self.after == 0:
            assert self.supervision.last_step.request(signal.SIGTERM)

    def on_interrupt(self, trainer: Any) -> None:
        self.interrupted += 1


@each("after", [1, STEPS, STEPS + 2, 2 * STEPS])
def test_a_run_that_a_signal_has_ended_is_resumed_to_the_same_bytes(after, tmp_path):
    data, validation = small_data()
    whole = small_trainer(Serial())
    whole.fit(data, validation, epochs=2, batch_size=8)
    comm = Serial()
    comm.supervise(supervise_alone())
    signalled = Signalled(comm.supervision, after)
    trainer = small_trainer(comm, signalled, Checkpointer(tmp_path, every_epochs=5))
    with pytest.raises(
        errors.Interrupted, match="rank 0 received SIGTERM: training has ended"
    ) as error:
        trainer.fit(data, validation, epochs=2, batch_size=8)
    assert error.value.signal == signal.SIGTERM
    assert signalled.interrupted == 1
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"checkpoint-{after:08}"]
    again = small_trainer(Serial(), Signalled(None, 0), Checkpointer(tmp_path, every_epochs=5))
    load_checkpoint(tmp_path, again)
    again.fit(data, validation, epochs=2, batch_size=8)
    assert again.history == whole.history
    assert checksums(again.model.state()) == checksums(whole.model.state())


def test_outside_of_training_a_signal_does_not_wait_for_a_step():
    comm = Serial()
    comm.supervise(supervise_alone())
    trainer = small_trainer(comm)
    last_step = comm.supervision.last_step  # type: ignore[union-attr]
    assert not last_step.request(signal.SIGTERM)
    trainer.fit(*small_data(), epochs=1, batch_size=8)
    assert not last_step.request(signal.SIGTERM)
