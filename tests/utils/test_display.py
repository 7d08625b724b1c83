"""Lines and bars that fit the terminal."""

from __future__ import annotations

import io
import re

import pytest

from pydtnn.utils.display import NARROWEST_BAR, Bar, Lines, Piece, fit_pieces

PIECES = [
    Piece(4, "12:34 left"),
    Piece(3, "loss 0.5123"),
    Piece(5, "accuracy 0.8123"),
    Piece(9, "last loss 0.4981"),
    Piece(8, "lr 0.0123"),
    Piece(6, "443 samples/s"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(text: str) -> list[str]:
    """What a terminal showed, one entry for each time that it began a line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("width", range(5, 120, 7))
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


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("title", ["epoch 1/4", "epoch 100/200"])
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
    assert last.count("━") >= NARROWEST_BAR
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
