"""What a run shows."""

from __future__ import annotations

import io

import pytest

from pydtnn.callbacks import (
    ProgressBar,
)
from pydtnn.comm import Communicator
from tests.small_training import (
    STEPS,
    small_fit,
    small_trainer,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_a_line_per_epoch() -> None:
    file = io.StringIO()
    history = small_fit(small_trainer(None, ProgressBar(file)), epochs=2)
    first, second = file.getvalue().splitlines()
    for number, (line, logs) in enumerate(zip((first, second), history, strict=True), 1):
        assert line.startswith(f"epoch {number}/2  loss {logs['loss']:.4f}  accuracy ")
        assert f"  lr {logs['lr']:.3g}  val_loss {logs['val_loss']:.4f}  val_accuracy " in line
        assert line.endswith(" s")
        assert " images/s  " in line


def test_progress_without_a_terminal_tells_steps_when_it_is_time() -> None:
    file = io.StringIO()
    small_fit(small_trainer(None, ProgressBar(file, interval=0)), epochs=1)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == [f"step {i}/4" for i in (1, 2, 3, 4)]
    assert all(line.startswith("epoch 1/1  ") and " images/s" in line for line in lines)


def test_progress_on_a_terminal_is_a_bar_and_a_line_per_epoch() -> None:
    file = Terminal()
    small_fit(small_trainer(None, ProgressBar(file)), epochs=2)
    text = file.getvalue()
    assert "epoch 1/2  loss " in text
    assert "epoch 2/2  loss " in text
    assert text.rstrip().rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor is back


def test_progress_goes_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    small_fit(small_trainer(None, ProgressBar()), epochs=1)
    assert capsys.readouterr().out.startswith("epoch 1/1  loss ")


@pytest.mark.threads(3)
def test_only_rank_0_shows_progress(comm: Communicator) -> None:
    file = io.StringIO()
    small_fit(small_trainer(comm, ProgressBar(file)), epochs=1)
    assert len(file.getvalue().splitlines()) == (comm.rank == 0)


def test_a_resumed_bar_starts_where_the_run_stands() -> None:
    file = io.StringIO()
    trainer = small_trainer(None, ProgressBar(file, interval=0))
    trainer.epoch, trainer.step = 1, 3
    small_fit(trainer, epochs=2)
    assert file.getvalue().startswith("epoch 2/2  step 4/4  ")


def test_a_closed_bar_can_be_closed_again() -> None:
    file = Terminal()
    bar = ProgressBar(file)
    bar.on_fit_start(small_trainer(), 1, STEPS)
    bar.close()
    bar.close()
    assert file.getvalue().count("\x1b[?25h") == 1
