"""What a run shows."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from pydtnn.callbacks import (
    ProgressBar,
)
from pydtnn.comm import Communicator, Serial
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training import Trainer
from pydtnn.training.progress import MIN_BAR_WIDTH, Bar, Lines, Piece, fit_pieces
from tests.each import each
from tests.small_training import (
    STEPS,
    small_data,
    small_fit,
    small_model,
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
        assert " samples/s  " in line


def test_progress_without_a_terminal_tells_steps_when_it_is_time() -> None:
    file = io.StringIO()
    small_fit(small_trainer(None, ProgressBar(file, interval=0)), epochs=1)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == [f"step {i}/4" for i in (1, 2, 3, 4)]
    assert all(line.startswith("epoch 1/1  ") and " samples/s" in line for line in lines)


def test_the_loss_of_the_last_step_and_the_time_left_are_shown_within_an_epoch() -> None:
    file = io.StringIO()
    trainer = small_trainer(None, ProgressBar(file, interval=0))
    small_fit(trainer, epochs=1)
    lines = file.getvalue().splitlines()[:-1]
    for line, loss in zip(lines, trainer.losses, strict=True):
        assert f"  last loss {loss:.4f}  " in line
        assert re.search(r"  0:\d\d left  loss ", line)


@each(
    ("style", "terminal", "bar"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("bar", False, True),
        ("plain", True, False),
    ],
)
def test_the_style_chooses_between_a_bar_and_lines(style: str, terminal: bool, bar: bool) -> None:
    file = Terminal() if terminal else io.StringIO()
    small_fit(small_trainer(None, ProgressBar(file, style=style)), epochs=1)
    assert ("\x1b[?25l" in file.getvalue()) == bar
    assert "epoch 1/1  loss " in file.getvalue()


def test_a_terminal_without_control_sequences_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    small_fit(small_trainer(None, ProgressBar(file)), epochs=1)
    assert "\x1b" not in file.getvalue()


def plain_trainer(comm: Communicator | None = None, **options: Any) -> Trainer:
    """A trainer with the default progress, unless `options` choose another."""
    exchange = AllReduce(comm or Serial())
    return Trainer(small_model(), SGD(0.01), exchange=exchange, **options)


@each(
    ("options", "lines"),
    [
        ({}, 1),
        ({"progress": True}, 1),
        ({"progress": "plain"}, 1),
        ({"progress": "none"}, 0),
        ({"progress": False}, 0),
        ({"callbacks": [ProgressBar()]}, 1),
        ({"callbacks": [ProgressBar()], "progress": False}, 1),
    ],
)
def test_a_trainer_shows_its_progress_once_unless_it_is_turned_off(
    options: dict[str, Any], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = plain_trainer(**options)
    small_fit(trainer, epochs=1)
    printed, told = capsys.readouterr()
    assert (len(printed.splitlines()), told) == (lines, "")
    assert trainer.callbacks == options.get("callbacks", [])


@each("progress", ["bars", 3, None])
def test_another_progress_is_refused(progress: Any) -> None:
    with pytest.raises(ValueError, match="^Trainer: unknown value of progress '"):
        plain_trainer(progress=progress)
    with pytest.raises(ValueError, match="^ProgressBar: unknown style 'line'"):
        ProgressBar(style="line")


def test_epochs_that_are_complete_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = plain_trainer()
    small_fit(trainer, epochs=2)
    capsys.readouterr()
    small_fit(trainer, epochs=2)
    sentence = "fit: nothing to train: 2 epochs are complete, and epochs=2 counts from the beginnin"
    assert capsys.readouterr().out.startswith(sentence)
    assert len(trainer.history) == 2
    plain_trainer().fit(small_data()[0], epochs=0, batch_size=8)
    assert capsys.readouterr().out == ""


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
    shown = file.getvalue()
    bar.close()
    assert file.getvalue() == shown


PIECES = [
    Piece(4, "12:34 left"),
    Piece(3, "loss 0.5123"),
    Piece(5, "accuracy 0.8123"),
    Piece(9, "last loss 0.4981"),
    Piece(8, "lr 0.0123"),
    Piece(6, "443 samples/s"),
]


def drawn(text: str) -> list[str]:
    """What a terminal showed, one entry for each time that it began a line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@each("width", range(5, 120, 7))
def test_pieces_fit_and_keep_their_order(width: int) -> None:
    text = fit_pieces(PIECES, width)
    assert len(text) <= width
    chosen = text.split("  ") if text else []
    assert chosen == [piece.text for piece in PIECES if piece.text in chosen]
    if width >= len("loss 0.5123"):
        assert "loss 0.5123" in chosen


def test_all_pieces_are_kept_where_there_is_room() -> None:
    assert fit_pieces(PIECES, 200) == "  ".join(piece.text for piece in PIECES)
    assert fit_pieces([], 10) == ""


@each("width", [40, 60, 80, 200])
@each("title", ["epoch 1/4", "epoch 100/200"])
def test_a_bar_fits_its_terminal(width: int, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    file = Terminal()
    bar = Bar(file, 1563)
    bar.begin(title, 0)
    for step in (1, 99, 1563):
        bar.step(title, step, PIECES)
    bar.line([Piece(0, title), *PIECES])
    bar.close()
    lines = drawn(file.getvalue())
    assert max(map(len, lines)) <= width
    last = next(line for line in reversed(lines) if "1563/1563" in line)
    assert last.count("━") >= MIN_BAR_WIDTH
    assert ("loss 0.5123" in last) == (len(title) + len("1563/1563  loss 0.5123") + 8 <= width)
    assert ("last loss" in last) == (width == 200)
    result = next(line for line in lines if line.startswith(title) and "━" not in line)
    assert "loss 0.5123" in result


def test_a_bar_follows_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    bar = Bar(file, 10)
    for width in (120, 50):
        monkeypatch.setenv("COLUMNS", str(width))
        bar.step("epoch 1/2", 5, PIECES)
    bar.close()
    lines = [line for line in drawn(file.getvalue()) if "5/10" in line]
    assert len(lines[0]) > 60
    assert len(lines[-1]) <= 50


def test_the_cursor_is_visible_while_a_bar_is_shown() -> None:
    file = Terminal()
    bar = Bar(file, 10)
    bar.step("epoch 1/2", 5, PIECES)
    text = file.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    bar.close()


def test_a_sentence_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = Terminal()
    bar = Bar(file, 10)
    bar.line([Piece(0, "x" * 50)])
    bar.close()
    assert "x" * 50 in file.getvalue()


def test_plain_lines_contain_everything() -> None:
    file = io.StringIO()
    lines = Lines(file, 10)
    lines.begin("epoch 1/2", 0)
    lines.step("epoch 1/2", 3, PIECES)
    lines.line(PIECES)
    lines.close()
    text = fit_pieces(PIECES, 1000)
    assert file.getvalue() == f"epoch 1/2  step 3/10  {text}\n{text}\n"
