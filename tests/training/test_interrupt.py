"""A signal ends training after a step; a resumed run has the bytes of an unbroken one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pydtnn.callbacks import Callback, Checkpointer
from pydtnn.comm import Serial
from pydtnn.comm.supervision import supervise_alone
from pydtnn.training.checkpoint import find_checkpoints, load_checkpoint
from pydtnn.utils.errors import Interrupted
from tests.each import each
from tests.small_training import STEPS, checksums, small_data, small_trainer


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
def test_a_run_that_a_signal_has_ended_is_resumed_to_the_same_bytes(
    after: int, tmp_path: Path
) -> None:
    data, validation = small_data()
    whole = small_trainer(Serial())
    whole.fit(data, validation, epochs=2, batch_size=8)
    comm = Serial()
    comm.supervise(supervise_alone())
    signalled = Signalled(comm.supervision, after)
    trainer = small_trainer(comm, signalled, Checkpointer(tmp_path, every_epochs=5))
    with pytest.raises(Interrupted, match="rank 0 received SIGTERM: training has ended") as error:
        trainer.fit(data, validation, epochs=2, batch_size=8)
    assert error.value.signal == signal.SIGTERM
    assert signalled.interrupted == 1
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"checkpoint-{after:08}"]
    again = small_trainer(Serial(), Signalled(None, 0), Checkpointer(tmp_path, every_epochs=5))
    load_checkpoint(tmp_path, again)
    again.fit(data, validation, epochs=2, batch_size=8)
    assert again.history == whole.history
    assert checksums(again.model.state()) == checksums(whole.model.state())


def test_outside_of_training_a_signal_does_not_wait_for_a_step() -> None:
    comm = Serial()
    comm.supervise(supervise_alone())
    trainer = small_trainer(comm)
    last_step = comm.supervision.last_step  # type: ignore[union-attr]
    assert not last_step.request(signal.SIGTERM)
    trainer.fit(*small_data(), epochs=1, batch_size=8)
    assert not last_step.request(signal.SIGTERM)
