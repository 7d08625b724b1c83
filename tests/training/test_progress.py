"""What a run shows."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from pydtnn.callbacks import ProgressBar
from pydtnn.comm import Communicator, Serial
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training import Trainer
from pydtnn.training.progress import MIN_BAR_WIDTH, LinePiece, TerminalBar, fit_pieces
from tests.each import each
from tests.small_training import small_data, small_fit, small_model, small_trainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_a_line_per_epoch():
    file = io.StringIO()
    history = small_fit(small_trainer(None, ProgressBar(file)), epochs=2)
    first, second = file.getvalue().splitlines()
    for number, (line, logs) in enumerate(zip((first, second), history, strict=True), 1):
        assert line.startswith(f"epoch {number}/2  loss {logs['loss']:.4f}  accuracy ")
        assert f"  lr {logs['lr']:.3g}  val_loss {logs['val_loss']:.4f}  val_accuracy " in line
        assert line.endswith(" s")
        assert " samples/s  " in line


def test_steps_have_lines_with_their_loss_and_the_time_left_when_it_is_time():
    file = io.StringIO()
    trainer = small_trainer(None, ProgressBar(file, interval=0))
    small_fit(trainer, epochs=1)
    lines = file.getvalue().splitlines()[:-1]
    for step, (line, loss) in enumerate(zip(lines, trainer.losses, strict=True), 1):
        assert line.startswith(f"epoch 1/1  step {step}/4  ")
        assert f"  last loss {loss:.4f}  " in line
        assert re.search(r"  0:\d\d left  loss ", line)


def test_the_time_left_is_that_of_all_other_steps_at_the_speed_so_far():
    bar = ProgressBar(io.StringIO())
    bar._begin, bar._now, bar._first, bar._steps = 10.0, 40.0, 2, 132
    assert [bar._remaining(step) for step in (12, 3, 131)] == [
        "6:00 left",
        "1:04:30 left",
        "0:00 left",
    ]


@each(
    ("style", "file", "term", "bar"),
    [
        ("auto", Terminal, "xterm", True),
        ("auto", Terminal, "dumb", False),
        ("auto", io.StringIO, "xterm", False),
        ("bar", io.StringIO, "xterm", True),
        ("plain", Terminal, "xterm", False),
    ],
)
def test_the_style_chooses_between_a_bar_and_lines(style, file, term, bar, monkeypatch):
    monkeypatch.setenv("TERM", term)
    own = ProgressBar(file(), style=style)
    small_fit(small_trainer(None, own), epochs=1)
    text = own.file.getvalue()
    assert text.count("epoch 1/1  loss ") == 1
    assert (text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0) == bar  # the cursor is back


def plain_trainer(comm: Communicator | None = None, **options: Any) -> Trainer:
    """A trainer with the default progress, unless `options` choose another."""
    exchange = AllReduce(comm or Serial())
    return Trainer(small_model(), SGD(0.01), exchange=exchange, **options)


@each(
    ("options", "lines"),
    [({}, 1), ({"progress": "plain"}, 1), ({"progress": "none"}, 0)]
    + [({"progress": False}, 0), ({"callbacks": [ProgressBar()]}, 1)],
)
def test_a_trainer_shows_its_progress_once_unless_it_is_turned_off(options, lines, capsys):
    trainer = plain_trainer(**options)
    small_fit(trainer, epochs=1)
    printed, told = capsys.readouterr()
    assert (len(printed.splitlines()), told) == (lines, "")
    assert trainer.callbacks == options.get("callbacks", [])


@each("progress", ["bars", 3, None])
def test_another_progress_is_refused(progress):
    with pytest.raises(ValueError, match="^Trainer: unknown value of progress '"):
        plain_trainer(progress=progress)
    with pytest.raises(ValueError, match="^ProgressBar: unknown style 'line'"):
        ProgressBar(style="line")


def test_epochs_that_are_complete_are_reported(capsys):
    trainer = plain_trainer()
    small_fit(trainer, epochs=2)
    capsys.readouterr()
    small_fit(trainer, epochs=2)
    sentence = "fit: nothing to train: 2 epochs are complete, and epochs=2 counts from the beginnin"
    assert capsys.readouterr().out.startswith(sentence)
    assert len(trainer.history) == 2
    plain_trainer().fit(small_data()[0], epochs=0, batch_size=8)
    assert capsys.readouterr().out == ""


@pytest.mark.threads(3)
def test_only_rank_0_shows_progress(comm):
    file = io.StringIO()
    small_fit(small_trainer(comm, ProgressBar(file)), epochs=1)
    assert len(file.getvalue().splitlines()) == (comm.rank == 0)


PIECES = [
    LinePiece(4, "12:34 left"),
    LinePiece(3, "loss 0.5123"),
    LinePiece(5, "accuracy 0.8123"),
    LinePiece(9, "last loss 0.4981"),
    LinePiece(8, "lr 0.0123"),
    LinePiece(6, "443 samples/s"),
]


def drawn(text: str) -> list[str]:
    """What a terminal showed, one entry for each time that it began a line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@each("width", [5, 10, 11, 30, 47, 80, 120])
def test_pieces_fit_and_keep_their_order(width):
    text = fit_pieces(PIECES, width)
    assert len(text) <= width
    chosen = text.split("  ") if text else []
    assert chosen == [piece.text for piece in PIECES if piece.text in chosen]
    assert ("loss 0.5123" in chosen) == (width >= len("loss 0.5123"))
    assert (chosen == [piece.text for piece in PIECES]) == (width == 120)


@each("width", [40, 60, 80, 200])
@each("title", ["epoch 1/4", "epoch 100/200"])
def test_a_bar_fits_its_terminal(width, title, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    file = Terminal()
    bar = TerminalBar(file, 1563)
    bar.begin(title, 0)
    for step in (1, 99, 1563):
        bar.step(title, step, PIECES)
    bar.line([LinePiece(0, title), *PIECES])
    bar.close()
    bar.close()
    lines = drawn(file.getvalue())
    assert max(map(len, lines)) <= width
    last = next(line for line in reversed(lines) if "1563/1563" in line)
    assert last.count("━") >= MIN_BAR_WIDTH
    assert ("loss 0.5123" in last) == (len(title) + len("1563/1563  loss 0.5123") + 8 <= width)
    assert ("last loss" in last) == (width == 200)
    result = next(line for line in lines if line.startswith(title) and "━" not in line)
    assert "loss 0.5123" in result
